"""Every threshold of ours, with the reason for its value."""

SAVED_ROWS = 12
"""Rows in the text report's table of saved tensors. Blocks are folded, so a dozen covers a model's kinds of layer;
two lines each keep the table on one screen. The rest is summed in one line, and JSON has all."""

UNKNOWN_SHARE = 0.01
"""Share of the peak without a proof above which a report says so beside the figure: below it no advice could
change, whatever those bytes are."""

PLOT_COLUMNS = 900
"""Columns that a timeline is drawn in: about as many pixels as its axes have in a picture 7 inches wide at 200 dots an
inch. Each column keeps its lowest and its highest moment, so nothing that could be seen is lost, and a vector file of
a million events stays near half a megabyte."""

PLOT_STEP_COLUMNS = 4
"""Columns that a step must have for its ups and downs to be drawn: below that they are a pattern of stripes that
depends on the width of the picture, and the highest and lowest moments are drawn instead."""

PLOT_PHASES = 60
"""Phases up to which a panel shades each; beyond that, stripes finer than a millimetre would hide the curve."""

PLOT_VISIBLE = 0.0025
"""Share of the peak that a role must reach at some moment, or be there at the peak, to have a place in the legend:
less is thinner than a pixel."""

WATCHED_LIGHT_STEPS = 4
"""Of light steps that do the same, one in this many has its saved tensors noted: hooks on them cost PyTorch about a
hundredth of a step, even where they do nothing, and a quarter of that is little beside the rest."""

UNEXPLAINED_SHARE = 2000
"""One part in this many of the live bytes may go unexplained before the recorder walks the references to see who
holds it: a walk takes tens of milliseconds, and less than a twentieth of UNKNOWN_SHARE changes no report."""

GROWTH_BIRTHS = 3
"""Steps from which something must be alive at once for a place to be growing: two are a step's result that is still
held during the next, which every loop has."""

GROWTH_RUN = 5
"""New maxima in a row that make a single, ever larger allocation growth (a tensor concatenated onto itself). Of
batches of random lengths that many rising ones in a row are one in a hundred (1/5!)."""

SHORTAGE_BYTES = 2 << 20
"""Peak below which a run is short of nothing: CUDA's allocator takes no less than this from the device at once, so
whatever such a run did, it could not take less."""

FINDING_SHARE = 0.2
"""Share of the peak from which a class of memory is a finding. What is less could not lower the peak by a fifth, the
least that lets a batch of four become one of five."""

SWELLING_SHARE = 0.02
"""Share of the peak from which it is told that temporaries grow with a leak: twice what a comparison of two runs takes
for the same (COMPARED_SHARE), and well below what an advice may be off by."""

LEAK_STEPS = 1000
"""Steps within which growth must double the peak to be a leak: real runs have thousands, and what does not matter in
a thousand (a loss of four bytes kept for each) is no shortage."""

PATTERN_SHARE = 0.5
"""Share of a class's bytes that a named pattern must have to be named: less than half is not what it is made of."""

MICRO_BATCHES = 4
"""Forwards of one model alive together that are taken for micro-batches: pairs and triplets are what losses over
several inputs need at once."""

SNAPSHOT_PARAMETERS = 2
"""Parameters that a model must have for storages of their sizes to be copies of it: of a single one, any tensor may
have the size by chance."""

SAMPLES = 4
"""How many times as large as the parameters' gradients those of single samples must be: of fewer samples they are no
shortage, and a batch's own activations have twice or thrice a weight's size by chance."""

ACCUMULATION_STEPS = 2
"""Steps of the optimizer that must have gone wrong with their gradients for it to be a mistake: a backward before the
loop, to have memory reserved or a graph compiled, is thrown away once and on purpose."""

HOST_GROWTH_BYTES = 32 << 20
"""Growth of the process, over the later half of the run, below which it is noise: the C library gives memory back in
arenas of this size or less, and reading the recording takes up to about as much for a while."""

RECORDING_ADDS = 128 << 20
"""Growth of the process that the recording itself may cause: it added 124 MiB at most in the runs of
``benchmarks/long_run.py``. Less than that is no finding, unless somebody was found who keeps it."""

HOST_GROWTH_STEPS = 8
"""Steps from which the growth of the process is judged: the later half is then four increments, of which two may be
leaps of the C library without moving the median."""

HOST_LOOK_BYTES = HOST_GROWTH_BYTES // 2
"""Growth of the process from which the recorder looks for containers of arrays, the first time; then after each growth
by LOOK_AGAIN. Growth shows between two looks, and what HOST_GROWTH_BYTES makes a finding has had two by then."""

HOST_CONTAINER_SHARE = 0.25
"""Share of the process's growth from look to look that a container's own growth must have to be named: several may
share in it, and less than a quarter is not what it is made of."""

HOST_LOOK_OBJECTS = 10_000_000
"""Objects and references that a look for containers may go through: about three seconds. A usual script has a twentieth
of it, or less."""

HOST_LOOK_ITEMS = 2_000_000
"""Items from which a container is passed over: at the growth that matters they would be of some bytes each, and no
arrays; the list of them alone would take tens of megabytes."""

WORST_BATCH = 1.5
"""How far the step of the peak must stand above the median one, as a factor, for its batch to be the odd one: batches
of equal shapes differ by a few per cent."""

SPARSE_ROWS = 4
"""Rows of an embedding's table for each index of a batch, from which a sparse gradient is advised: its rows and their
indices are held about three times while backward adds up those that occur more than once."""

UNDETERMINED_SHARE = 0.5
"""Share of the peak without a class beyond which no class is named: it could be more than any other."""

SCALING_SHARE = 0.05
"""Share of the peak that a role must have for its scaling to be told: less would not change with the batch enough to
matter."""

SCALING_FIT = 0.05
"""How far a role may lie from a straight line through the steps, of its highest, to scale with a dimension: the
allocator's own rounding and a few fixed workspaces; what is quadratic lies farther off over a factor of 1.5."""

RECOMPUTE_FREES = 0.05
"""Share of the peak that checkpointed regions must free together to be worth having: the noise of a batch's size."""

RECOMPUTE_TIME = 0.1
"""Share of a step from which recomputation is a cost to speak of; checkpointing every block costs about a quarter."""

REPORT_FINDINGS = 4
"""Findings in the text report: more than the first few are small by definition, and JSON has all."""

LOOK_AGAIN = 1.5
"""Growth of what is alive from one place, as a factor, after which the recorder looks again for who keeps it. A leak of
equal parts is then looked at in steps 3, 5, 8, 12 and so on: early enough to name it, and a number of times that grows
with the logarithm of the run."""

WALK_COMPARISONS = 4_000_000_000
"""Work that one walk of references may do: objects looked at, times objects looked for. It is about six seconds on a
processor of today, and reached only by scripts with millions of objects; with 300,000, as usual, a walk takes two
tenths of a second."""

WALK_INDEX = 500_000
"""Objects up to which a walk that looks for many things at once makes an index of all references: half a second for
300,000 objects. Beyond it the memory of the index would show: 24 bytes for a reference, of which an object has ten."""

WALK_NODES = 300_000
"""Nodes of autograd's graph that one walk visits: about half a second. A step of a large model has some thousands."""

PLAN_LABELS = 2000
"""Ways through a part of the model that a search for plans goes on with: of a thousand blocks it then takes seconds,
and the ways that are left out lie between two that are kept."""

PLAN_AIMS = 4
"""Times that the aim of a search is lowered by what regions share: what is too much after a few is not due to that."""

PLAN_MOMENTS = 1_000_000
"""Moments that are replayed for one plan that is looked for: about a second on a processor of today. A report looks for
some twenty."""

PLAN_LEAST_MOMENTS = 5_000
"""A replay takes as long as of so many moments at least, whatever the step's length: what it does once for each."""

PLAN_POINTS = 12
"""Plans between none and the smallest in a report: as many as fit a table, and a twelfth of the way is about what one
block of twelve does."""

PLAN_TOLERANCE = 0.001
"""Share of the peak to which the smallest one is looked for: a tenth of what the noise of a batch's size is."""

PLAN_CANDIDATES = 10_000
"""Modules, runs of them and the same with operators kept that a search for plans takes: a thousand blocks with their
runs, as a whole; of a hundred blocks all that is in them too."""

PLAN_KEPT = 4
"""Operators that one checkpoint keeps at most: the first few take most of the time, and what they make is the largest
of what it saves."""

PLAN_KEPT_SHARE = 0.05
"""Share of the time of a checkpoint that an operator must take to be kept: to keep one, each operator of the region is
called by way of Python, which takes some microseconds."""

PLAN_RUN = 16
"""Modules in one checkpoint at most: what all of them make is there at once when they run again."""

PLAN_POOR_GAIN = 0.7
"""Share of what a module saves by which the peak must fall, at most, for it to be told that this is less than it seems:
what it was given stays, which is a tenth or a fifth of what a usual block saves."""

PLAN_POOR_ALIKE = 0.9
"""Share of what the first module saves from which another saves as much: equal blocks differ by what they are given."""

PLAN_POOR_SHARE = 0.05
"""Share of the peak that a module must save for anybody to think of it: of twelve equal blocks each saves as much."""

PLAN_HOLDERS = 3
"""Holders of the lowest peak that are named where no plan fits: the rest is smaller than each of them."""

PLAN_LINES = 2
"""Lines of a row in the table of plans: the modules of most plans, folded; the chosen one is printed in full."""

PLAN_BY_HAND = 0.01
"""Share of the step's time that a plan must spare to be worth a change of the script: less is within what steps differ
by."""

PLAN_REASONS = 6
"""Unsafe modules in the text report of plans: the first few say what is the matter, and JSON has all."""

PLAN_GAINS = 8
"""Modules whose own gain a report of plans shows: with the table of plans it stays on one screen, and JSON has all."""

OOM_REMEDIES = 3
"""Remedies named for a request that failed: the best ones; what frees less than three others is not tried first."""

OOM_PLACES = 5
"""Places of birth in the text report of what filled the memory: repeated blocks are one, and JSON has all."""

COMPARED_LINES = 12
"""Places in the text report of two runs compared, as many as of saved tensors; the rest is summed, and JSON has all."""

COMPARED_SHARE = 0.01
"""Share of the peak from which it matters to a comparison what one run has more: growth over its further steps, or a
warm-up that stands above the later steps. As for UNKNOWN_SHARE, below it no conclusion would change."""

PROBED_DEPTH = 4
"""How far into containers and objects it is looked whether a module call changes them: the attribute, a cache in it,
the layers of the cache, what each of them holds."""

PROBED_ITEMS = 1_000
"""Items up to which a container is looked at one by one; of a longer one only the length is compared. A log or a cache
that a forward writes to grows, and a data set of a million items that a module knows would take seconds each time."""

PROBED_OBJECTS = 2_000
"""Containers and objects looked into for one attribute. A trainer that a module knows leads to tens of thousands; what
a forward itself keeps is some tens."""

PROBED_BYTES = 16 * 2**20
"""Size up to which the values of a NumPy array that a module keeps are compared: a hundredth of a second each time."""

CHECK_NOISE = 4
"""Times the difference between two runs of one script that a run with checkpoints may differ by, as norms: of a few
runs of a reduction whose order changes, the largest difference is a small multiple of a typical one."""

CHECK_COSINE = 1e-6
"""By which the cosine between a value of two runs may be below 1: rounding turns no direction, another mask does."""

CHECK_NAMES = 4
"""Names of what differs in the text report of a check: repeated blocks are one, and JSON has all."""

CHECK_ELEMENT = 8
"""Units of a data type, times the root of the length of a sum and the root mean square of a value, that one element may
be off where two runs of one script differ: rounding errors of a sum grow as the root of its length, and the largest of
a million is some five standard deviations out."""
