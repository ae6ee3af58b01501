"""Parameter counts of every variant with 1000 classes, as others count or publish them."""

# No pre-logits layer, 224 pixels: vit_jax/models_test.py
VIT_PARAMETERS = {
    "Ti/16": 5_717_416,
    "S/16": 22_050_664,
    "S/32": 22_878_952,
    "B/8": 86_576_872,
    "B/16": 86_567_656,
    "B/32": 88_224_232,
    "L/16": 304_326_632,
    "L/32": 306_535_400,
    "H/14": 632_045_800,
    "R+Ti/16": 6_337_704,
    "R26+S/32": 36_431_912,
    "R26+B/32": 101_383_976,
    "R50+B/16": 98_659_112,
    "R50+L/32": 328_994_856,
    # the two that were never released, from the others: the same ResNet in front of the other Transformer
    "R50+B/32": 328_994_856 - (306_535_400 - 88_224_232) + (32 * 32 * 3 - 2048) * (1024 - 768),
    "R50+L/16": 98_659_112 + (304_326_632 - 86_567_656) - (16 * 16 * 3 - 1024) * (1024 - 768),
    "S/16-gap-norep": 22_049_896,
    "S/32-gap-norep": 22_878_184,
    "B/16-gap-norep": 86_566_120,
    "B/32-gap-norep": 88_222_696,
}

# Those with a source: `resnetv2_*_bit` in timm 1.0.31.
BIT_PARAMETERS = {
    "R50x1": 25_549_352,  # timm
    "R50x2": 97_988_712,
    "R50x3": 217_319_080,  # timm
    "R101x1": 44_541_480,  # timm
    "R101x3": 387_934_888,  # timm
    "R152x1": 60_185_128,
    "R152x2": 236_335_208,  # timm
    "R152x4": 936_533_224,  # timm
    "R200x3": 568_633_000,
}
