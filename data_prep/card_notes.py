"""What the card of a data set says beside its counts: facts of its sources, and how our counts differ from others'."""

from collections.abc import Mapping, Sequence

_AUTHORS_SPLIT = (
    "The split is that of the SDPO authors: 90 to 10, single rows drawn at random with seed 42, so that a question "
    "may stand on both sides. `details.stem_disjoint` of a test row says whether its question (without the options, "
    "runs of blanks as one) occurs anywhere in the source's train; score the two kinds apart."
)
_RAW = (
    "The benchmark has one split, called test. Splits are made here, by hashing groups; they are not those of the "
    "rows that circulate with the SDPO code, so accuracies on the two do not compare.",
    "All files of level L3 are read. The 4,335 rows of L3 and multiple choice, in all four domains, are the rows of "
    "the SDPO authors; prompts are built as theirs are.",
)
_TOOLALPACA_TEST = (
    "Test: the 68 requests of ToolAlpaca's 100 simulated ones whose gold holds no `$`. Three rows (idx 4079, 4106, "
    "4107) expect a tool that their prompt does not offer, which leaves 65.",
    "In 19 of the 65 some value of the gold does not stand in the request. Under exact comparison these can only be "
    "guessed: a ceiling on accuracy. 16 expect more than one call.",
)

NOTES: Mapping[str, Sequence[str]] = {
    "sciknoweval-biology": (
        _AUTHORS_SPLIT,
        "The stems of the two protein-pair tasks are generic, so that 19 of 50 test rows share theirs with train. "
        "Their group is the stem with the pair of sequences, which none shares: no training row leaves.",
        "200 rows have two options under a system message that speaks of four. The message is left as it circulates.",
    ),
    "sciknoweval-chemistry": (_AUTHORS_SPLIT,),
    "sciknoweval-materials": (
        _AUTHORS_SPLIT,
        "5 of 94 test rows share their stem with train, and 16 training rows leave for it. Others count 2 (texts "
        "compared to the last blank) or 3 (outer blanks trimmed). One of the 5 is an exact copy (idx 365 of test, "
        "377 of train).",
        "Golds are doubtful: of 234 perovskite questions that can be checked against their own data, 90 golds agree "
        "with the criterion that the question states.",
    ),
    "sciknoweval-physics": (
        _AUTHORS_SPLIT,
        "7 of 80 test rows share their stem with train, and 13 training rows leave for it. Three more rows (5 and 6 "
        "options equal in all, 3 of them the gold) cannot be graded.",
    ),
    "sciknoweval-physics-permuted": (
        "The rows of `sciknoweval-physics` with options in another order, each row in its own, which the seed 1 and "
        "the row's id settle. Takes the preference for B away; what the option texts give away stays.",
        _AUTHORS_SPLIT,
    ),
    "sciknoweval-mixed": (
        "Equal numbers of training rows of the four domains: as many as the smallest, Biology, has. Dev and test are "
        "all rows of theirs, so accuracy is weighted by their sizes; read it part by part.",
    ),
    "sciknoweval-biology-raw": (
        *_RAW,
        "The 100 true/false rows (solubility) are a data set of their own, `sciknoweval-solubility-raw`: the 500 "
        "others are what is published on, and a profile's numbers and a warm-up hold for one kind of answer.",
    ),
    "sciknoweval-chemistry-raw": (
        *_RAW,
        "300 rows (balancing) are to be filled in and have no grader.",
    ),
    "sciknoweval-materials-raw": (
        *_RAW,
        "One perovskite row (line 60) has five texts for four labels. Its first text is a stray sentence, so the "
        "gold letter would still be right, but an option would be lost.",
        "6 rows are repeats, all perovskite. 11 promise a data block that is missing.",
    ),
    "sciknoweval-physics-raw": (
        *_RAW,
        "218 rows (formula derivation) lie among the L3 files and say of themselves that they are of level L5.",
    ),
    "sciknoweval-solubility-raw": (
        "The true/false rows of Biology, 46 Yes and 54 No. The SDPO authors leave them out, so the system message is "
        "ours, in the style of theirs.",
    ),
    "toolalpaca": (
        *_TOOLALPACA_TEST,
        "The 4,046 training rows are not shipped. All files in the folder named above are read, whatever they are "
        "called: rows of the SDPO code, of the hub's copy, or raw APIs (`train_data.json`). The first two are the "
        "same rows.",
    ),
    "toolalpaca-real": (
        *_TOOLALPACA_TEST,
        "Train and dev: the 114 requests to real APIs, which the authors made for evaluation. Whole APIs are dev; "
        "none is in test. It is what can be trained on without the training rows, and is a small part of them.",
        "Access keys in the gold were published and read REDACTED here; no policy can know them (30 rows flagged).",
        "6 requests to AviationAPI expect tools that its documentation names otherwise, 4 inputs are no JSON.",
    ),
}
