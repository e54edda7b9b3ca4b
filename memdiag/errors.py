"""The one error a user is meant to see."""


class MemdiagError(Exception):
    """Bad input, said in one message that names the fix.

    The command line prints the message and exits with ``exit_code``.
    """

    def __init__(self, message: str, exit_code: int = 2) -> None:
        super().__init__(message)
        self.exit_code = exit_code
