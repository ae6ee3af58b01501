"""Module that only the server of data workers imports; see `workers`.

The server leaves the process group, as workers do, so that a signal to the group reaches only the training process.
"""

from .workers import leave_process_group

leave_process_group(0)
