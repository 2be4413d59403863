"""Every constant of the planner, with its unit: what it takes for good enough, and where it stops to try.

Those of compiled loops lie beside them in `kernels`: the cache of compiled code notices changes of its own file only.
"""

# Numbers.

#: Costs and tokens of a step add up to less than this, so int64 never overflows and float64 holds every sum exactly. A
#: quotient of two such sums is rounded once, to the nearest float64, by IEEE 754: it is the same on every machine.
MAX_SUM = 2**53

#: Speed of a rank that runs a cost of 1 in a time of 1: speeds are in parts of it.
FULL_SPEED = 1024

# Sizes of steps, in samples.

#: Above this the bin-packing bound of the makespan cannot beat the others by much, and is left out.
MAX_BISECTION_SAMPLES = 4096
#: Samples of a rank that the bound of the longest time of ranks of unequal speed counts.
MAX_TURNS = 8
#: Above this steps are planned with less care: time counts more than the last thousandth.
LARGE_STEP = 40_000
#: From this on steps are planned in two levels; below, that takes longer than to plan in one piece.
VERY_LARGE_STEP = 131_072

# Good enough: relative to the lower bound, unless said otherwise.

#: A free plan this near its bound is not worth another way to fill or another number of micro-batches.
GOOD_GAP = 0.001
#: The same for large steps, where another number costs more time than it saves.
GOOD_GAP_LARGE = 0.01
#: A plan that misses its limit by more than this part of the tolerance is worth giving up homes for.
FAR_ABOVE_TOLERANCE = 0.4
#: Excess over the mean that is not worth an exchange, as a divisor: one 4,000th.
GOOD_ENOUGH = 4000
#: Passes go on while each takes at least this part of what is left to gain, as a divisor: one 50th.
LEAST_PROGRESS = 50
#: Moved bytes over their bound up to which no other number of micro-batches is tried, and no other way to share the heavy
#: samples out.
FEW_BYTES_COUNTS, FEW_BYTES_BUILDS = 1.4, 2.5
#: What is added to the bound of ranks of unequal speed that wait in every micro-batch, in percent of the tolerance.
UNEQUAL_PERCENT = 80
#: A sample is heavy if fewer than so many of its weight fill a rank.
HEAVY_PER_RANK = 4

# How many numbers of micro-batches are tried.

#: In full, once one was found to work.
MAX_COUNTS = 4
#: By plans that give up homes.
MAX_HOMEWARD_COUNTS = 3
#: A pipeline's search tries all of them, up to so many samples times numbers.
MAX_SEARCH = 20_000

# How long samples are placed and exchanged.

#: Full packs that a sample passes over before it is left to the fallback.
TRIES = 64
#: Capacities that the fallback tries (MULTIFIT).
MAX_CAPACITIES = 8
#: Times that costs are evened out over all packs.
MAX_EVEN_PASSES = 3
#: Times that the packs of a rank are ordered and evened out, then those of an index.
MAX_RANK_PASSES, MAX_INDEX_PASSES = 16, 6
#: Times that all samples away from home are looked at.
MAX_HOMEWARD_PASSES = 3
#: Times that ranks which no other can relieve give by force, and how many of them each time.
MAX_FORCED_ROUNDS, MAX_FORCED_RANKS = 4, 64
#: Exchanges of two samples for two that end a free plan at step sync, and ranks tried for each.
MAX_POLISH, POLISH_PARTNERS = 200, 4
#: Rounds of exchanges.
MAX_ROUNDS = 24
#: Rounds without success, each with other partners, before a group of packs is left as it is.
PATIENCE = 4
#: Partners among which a pack chooses the cheapest exchange.
MAX_CHOICES = 16
#: Pairs of samples looked at per pair of packs; per sample, and besides, in one call.
MAX_PAIRS, PAIRS_PER_SAMPLE, PAIRS_PER_CALL = 2048, 500, 5_000_000

# Two levels.

#: A pod has at least so many ranks and samples where the planner chooses.
POD_RANKS, POD_SAMPLES = 256, 16_384
#: Numbers of micro-batches that may fail before the step is planned in one piece.
MAX_POD_FAILURES = 3
#: A plan by pods this near its aim, in thousandths, is not worth another round, with one phase and with several.
PODS_GOOD_ENOUGH = (10, 30)
#: A plan by pods so many thousandths above the bound and the tolerance is given up for one in one piece.
PODS_TOO_FAR = 50
#: Most load of a pod: its mean and, in hundredths, this part of what the tolerance allows a rank above it.
POD_LOAD_SHARE = {"step": 50, "microbatch": 0}
#: Most tokens of a pod, in hundredths: this part of the way from what the mean pod holds to what fits.
POD_TOKEN_SHARE = 50
#: Levels of micro-batches fall by so many hundredths from the middle to either end: like meets like, costliest first.
LEVEL_SLOPE = 1
#: Ranks that a miniature of the step has at least.
MINIATURE_RANKS = 128
#: Pairs of samples that one call of `refine` looks at in a pod, per sample: the time of one rank is the time of all.
POD_PAIRS_PER_SAMPLE = 60

# Windows of several steps.

#: Part of a micro-batch's room that is counted on when its samples are chosen before they are packed.
FULL_WINDOW_PACK = 0.96
#: Steps alike that a bound of longer windows takes together, and most samples of them.
WINDOW_STEPS, WINDOW_SAMPLES = 8, 131_072
