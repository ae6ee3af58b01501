"""Makes containers/: the same few arrays as flax and Orbax write them, in all the ways that a user can choose.

pip install jax==0.10.2 flax==0.12.8 orbax-checkpoint==0.12.8
JAX_PLATFORMS=cpu python tests/goldens_peers/make_containers.py
"""

import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from flax import serialization

HERE = Path(__file__).resolve().parent / "containers"
KERNEL = np.arange(35, dtype=np.float32).reshape(5, 7) / 8
STATE = {
    "params": {
        "head": {"kernel": jnp.asarray(KERNEL), "bias": jnp.zeros(7)},  # zeros, which some formats do not store
        "dotted.name": {"scale": jnp.asarray([1, -2.5], jnp.bfloat16)},
    },
    "opt_state": ({"mu": jnp.ones((5, 7))}, [jnp.full((3,), 2.0)]),
    "step": jnp.asarray(3),
}


def main() -> None:
    shutil.rmtree(HERE, ignore_errors=True)
    HERE.mkdir()
    np.savez(HERE / "kernel.npz", kernel=KERNEL)
    serialization.MAX_CHUNK_SIZE = 48  # bytes, in place of 1 GiB
    (HERE / "flax.msgpack").write_bytes(serialization.to_bytes({**STATE, "epoch": 5, "lr": np.float32(0.5)}))
    for name, options in {"ocdbt": {}, "zarr": {"use_ocdbt": False}, "zarr3": {"use_zarr3": True}}.items():
        handler = ocp.PyTreeCheckpointHandler(**options)
        ocp.Checkpointer(handler).save(HERE / f"orbax_{name}", STATE)
    with ocp.CheckpointManager(HERE / "orbax_steps") as manager:
        manager.save(7, args=ocp.args.StandardSave(STATE))
    for note in HERE.rglob("commit_success.txt"):  # names a folder of the machine that wrote it
        note.unlink()


if __name__ == "__main__":
    main()
