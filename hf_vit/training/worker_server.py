"""What the server of data workers imports, and nobody else: see `workers`.

It leaves the process group, as workers do, so that a signal to the group reaches the training process alone.
"""

from . import data as data
from .preemption import leave_process_group

leave_process_group(0)
