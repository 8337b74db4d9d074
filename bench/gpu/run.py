"""Measure GPU memory, groups 1 to 4 (docs/gpu.md), beside the expected figures: `python -m bench.gpu [1 2 3 4]`.

On a GPU it takes at most 110 GiB of the device and 40 GiB of host memory, and gives all of it back. Without a GPU
groups 1 and 2 run in host memory, which shows that the programs work but tells nothing about a GPU. Exits with 1 if a
measurement on a GPU misses its criterion.
"""

import argparse
import platform
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import psutil

from bench.gpu import t_ckpt, t_copy, t_ipc, t_param, t_vllm, t_vmm
from bench.gpu.report import GIB, MIB, Place, Row, table
from bench.measured.data import data_option, write_data
from glowplug_lab.gpu_slots.cuda_memory import CudaMemory
from glowplug_lab.gpu_slots.gpu_memory import GpuUnavailable

GROUPS: dict[int, tuple[Callable[[Place], Iterator[Row]], ...]] = {
    1: (t_vmm.run, t_copy.run),
    2: (t_ipc.run, t_param.run),
    3: (t_ckpt.run,),
    4: (t_vllm.run,),
}


def main(argv: list[str] | None = None) -> int:
    """Print the table of the groups asked for."""
    parser = argparse.ArgumentParser(description="GPU memory: mapping, copies, sharing, checkpoints, vLLM")
    parser.add_argument("groups", nargs="*", type=int, help="default: 1 2 3")
    parser.add_argument("--kind", choices=("auto", "host", "cuda"), default="auto")
    parser.add_argument("--device", type=int, default=0)
    parser.add_argument("--most-gib", type=float, default=110.0, help="of the GPU")
    parser.add_argument("--host-mib", type=int, default=64, help="of host memory, in place of a GPU")
    parser.add_argument("--weights", type=Path, help="a directory that vLLM reads, for group 4")
    data_option(parser)
    args = parser.parse_args(argv)
    kind, most, why = _place(args.kind, args.device, args.most_gib, args.host_mib)
    if why:
        print(why, file=sys.stderr)
    if not kind:
        return 2
    groups = args.groups or [1, 2, 3]
    if unknown := set(groups) - set(GROUPS):
        parser.error(f"no group {sorted(unknown)}: there are {sorted(GROUPS)}")
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="gp-bench-") as folder:
        place = Place(kind, args.device, most, Path(folder), args.weights)
        for group in groups:
            for script in GROUPS[group]:
                for row in script(place):
                    rows.append(row)
                    print(f"{row.id:4} {row.what}: {row.measured} {row.verdict}", file=sys.stderr, flush=True)
        print(f"load {psutil.getloadavg()[0]:.1f}, {psutil.cpu_count()} cores\n\n{table(rows, place)}")
    facts = {"kind": kind, "machine": platform.machine(), "kernel": platform.release()}
    write_data(args.json, {"machine": facts, "rows": [asdict(row) for row in rows]})
    return 1 if kind == "cuda" and any(row.is_met is False for row in rows) else 0


def _place(asked: str, device: int, most_gib: float, host_mib: int) -> tuple[str, int, str]:
    """(kind, bytes at most, message); the kind is "" if the requested one is missing."""
    if asked != "host":
        try:
            memory = CudaMemory(device)
        except GpuUnavailable as error:
            if asked == "cuda":
                return "", 0, str(error)
            return "host", host_mib * MIB, f"host memory, not a GPU: {error}"
        free = memory.mem_info()[0]
        memory.close()
        most = min(int(most_gib * GIB), free - 6 * GIB)  # contexts and libraries need some
        return "cuda", most // GIB * GIB, ""
    return "host", host_mib * MIB, "host memory, not a GPU"


if __name__ == "__main__":
    sys.exit(main())
