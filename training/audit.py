"""Audit a data set: probable label errors, duplicates, leaks, outliers, and images of poor quality.

    hf-vit audit MODEL --dataset FOLDER
    hf-vit audit MODEL --dataset FOLDER --train OTHER --output-dir audit
    accelerate launch training/audit.py MODEL --dataset FOLDER

These commands all run this script. `--help` explains every setting.
"""

import sys
from pathlib import Path

if Path(sys.path[0]).resolve() == Path(__file__).resolve().parent:
    sys.path.pop(0)  # otherwise evaluate.py in this folder would hide the package `evaluate`

try:
    import shlex
    from collections import Counter

    from accelerate import PartialState

    from hf_vit.auditing.audit import run_audit
    from hf_vit.data.issues import Issue
    from hf_vit.settings.fields import AuditSettings
    from hf_vit.settings.options import parse_settings
    from hf_vit.settings.recipes import show
    from hf_vit.training.api import run_script
    from hf_vit.training.launch import start_accelerator
except KeyboardInterrupt:  # imports take seconds
    print("error: interrupted", file=sys.stderr)
    sys.exit(130)


def audit(argv: list[str] | None = None) -> list[Issue]:
    """Audit a data set; print the number of issues of each kind, and return the issues."""
    settings = parse_settings(AuditSettings, argv, "hf-vit audit")
    if settings.print_config:
        show(settings)
        return []
    issues = run_audit(settings, start_accelerator(settings))
    processes = PartialState()
    if processes.is_main_process:
        for kind, count in Counter(issue.issue for issue in issues).items():
            print(f"{kind:16} {count:6,}")
        if settings.output_dir:
            output = Path(settings.output_dir)
            table = output / "issues.csv"
            command = f"hf-vit finetune --exclude {shlex.quote(str(table))} ..."
            print(f"open {output / 'audit.html'}, edit {table}, then run: {command}")
    processes.destroy_process_group()
    return issues


def main(argv: list[str] | None = None) -> None:
    """Run the script; `accelerate launch --tpu` calls this function in each process."""
    run_script(audit, argv)


if __name__ == "__main__":
    main()
