"""Formats of image files, with their suffixes. Other formats are not opened: Pillow starts a program for some (EPS)."""

IMAGE_FORMATS = {
    "JPEG": (".jpg", ".jpeg", ".jpe", ".jfif", ".mpo"),  # Pillow opens .mpo, JPEGs with a preview, as a kind of JPEG
    "PNG": (".png", ".apng"),
    "GIF": (".gif",),
    "BMP": (".bmp",),
    "DIB": (".dib",),
    "PPM": (".ppm", ".pgm", ".pbm", ".pnm", ".pfm"),
    "TIFF": (".tif", ".tiff"),
    "WEBP": (".webp",),
    "JPEG2000": (".jp2", ".j2k", ".j2c", ".jpc", ".jpf", ".jpx"),
    "AVIF": (".avif", ".avifs"),
    "HEIF": (".heic", ".heics", ".heif", ".heifs", ".hif"),  # read with pillow-heif
}
