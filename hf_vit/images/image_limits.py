"""What images and image processors may ask for at most, checked before memory is taken.

The largest photographs in use have 100 million pixels; the largest images that a Vision Transformer is run on are
tiles of 8,000 x 6,000 pixels.
"""

MAX_IMAGE_PIXELS = 2**27  # of an image that is read
MAX_OUTPUT_PIXELS = 2**26  # of an image after the resize, and after the crop
MAX_CHANNELS = 1_024
MAX_PATCHES = 2**20  # of an image
MAX_OUTPUT_VALUES = 2**28  # of one image, patches that are padded included
MAX_NESTING = 16  # lists of images inside each other
MAX_DOWNLOAD_BYTES = 2**26  # of an image behind an address
MAX_DOWNLOAD_SECONDS = 60.0  # for all of it
