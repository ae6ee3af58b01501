"""Datasets for training and evaluation.

| question | file |
| --- | --- |
| which datasets are there? | `sources` (folders of images: `folders`, with tables: `tables`) |
| which folders and files are which split and class? | `layout` |
| what is used, and what is not? | `summary` |
| what do the labels mean, which images are held out? | `splits`, `columns`, `labels` |
| which images come in which order, and in which batch? | `samplers` |
| what happens to an image? | `loaders`, `augmentation`, `randaugment`, `device_augmentation`, `native_resolution` |
| how are shards read and written? | `shards`, `shard_writing` |
| are these the same images as before? | `fingerprint` |
| what can the device do, and how do batches get there? | `devices` |

`shards` reads WebDataset tars and parquet files, on disks and in object stores, as a map-style dataset. Its order is a
function of the step, so that a run resumes at once, on any number of processes and workers. Libraries that read shards
do not have both: webdataset streams tars through a shuffle buffer, in an order that depends on the number of workers,
and starts at the beginning. litdata needs the data in its own format of chunks, which it assigns to workers. grain
has random access to its ArrayRecord files, but reads parquet files in sequence and has no reader of tars.
`StatefulDataLoader` of torchdata saves the state of each worker, which fits the same number of workers only, and has no
reader of shards.
"""
