"""What a reader accepts at most, checked on what a file declares before memory is taken for it.

No real checkpoint, recipe or index comes near. The limits of images are in `images/image_presets.py` and those of
configurations in `models/configuration_hf_vision.py`, which travel to the Hub.
"""

MAX_TEXT_BYTES = 2**26  # of a JSON, a recipe, an index or labels; AugReg's index of 51,509 files has 16 MB
MAX_DEPTH = 32  # lists and tables inside each other, in JSON and YAML
MAX_MESSAGE = 4_000  # characters of an error on standard error

MAX_CHECKPOINT_BYTES = 2**35  # of a download, and of all arrays of a checkpoint together: 8.6 billion float32 numbers
MAX_ARRAYS = 100_000  # in one checkpoint
MAX_COMPRESSION = 20  # bytes of all arrays for one of the file; weights compress to about nine tenths
ALWAYS_ALLOWED_BYTES = 2**28  # of arrays in a compressed file, whatever its size: a head of zeros compresses well
MAX_SHARD_NAMES = 10_000  # files that one index of weights names
