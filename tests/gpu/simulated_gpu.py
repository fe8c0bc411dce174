"""Simulate a GPU by an `nvidia-smi` that adds up the memory of pretended models."""

from __future__ import annotations

from pathlib import Path

TOTAL_MB = 24576
_SCRIPT = r"""#!/bin/sh
PATH=/usr/bin:/bin
cd "@FOLDER@" || exit 9
sum=0
use=0
for file in *.vram; do
    [ -e "/proc/${file%%.*}" ] && sum=$((sum + $(cat "$file" 2>/dev/null || echo 0)))
done
rows=
for file in *.use; do
    pid=${file%.use}
    [ -e "/proc/$pid" ] || continue
    one=$(cat "$file" 2>/dev/null)
    use=$((use + ${one:-0}))
    rows="$rows
    0  $pid  C  ${one:-0}  0  -  -  python"
done
case "$1" in
pmon)
    echo '# gpu  pid  type  sm  mem  enc  dec  command'
    echo '# Idx    #   C/G   %    %    %    %  name'
    echo "${rows:-    0    -     -   -    -    -    -  -}"
    ;;
--query-gpu=index,utilization.gpu,memory.used,memory.total) echo "0, $use, $sum, @TOTAL@" ;;
--query-gpu=index,uuid,memory.total) echo "0, GPU-pretended, @TOTAL@" ;;
--query-gpu=index,utilization.gpu) echo "0, $use %" ;;
--query-gpu=utilization.gpu) echo "$use %" ;;
--query-gpu=name) echo "a simulated GPU" ;;
*) exit 2 ;;
esac
"""


def install(folder: Path) -> Path:
    """Return a folder for PATH with that tool, which follows the files in `folder`."""
    tools = folder / "bin"
    tools.mkdir(parents=True)
    path = tools / "nvidia-smi"
    path.write_text(_SCRIPT.replace("@FOLDER@", str(folder)).replace("@TOTAL@", str(TOTAL_MB)))
    path.chmod(0o755)
    return tools
