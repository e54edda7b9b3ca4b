"""What is put around the script to watch it: calls of functions and modules, saves, the loop, threads."""
