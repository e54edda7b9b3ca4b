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

UNEXPLAINED_SHARE = 2000
"""One part in this many of the live bytes may go unexplained before the recorder walks the references to see who
holds it: a walk takes tens of milliseconds, and less than a twentieth of UNKNOWN_SHARE changes no report."""
