"""The commands of training and evaluation in this process: options -> metrics, or issues of an audit."""

from functools import partial

from hf_vit.cli.training import run_training

finetune = partial(run_training, "finetune")
pretrain = partial(run_training, "pretrain")
evaluate = partial(run_training, "evaluate")
audit = partial(run_training, "audit")
