"""Sort prompts by the size of their answer:   python sort.py IN.parquet OUT.parquet"""

import sys
from pathlib import Path

from pyarrow import compute, parquet

table = parquet.read_table(sys.argv[1])
order = compute.sort_indices(compute.cast(table["label"], "int64"))
Path(sys.argv[2]).parent.mkdir(parents=True, exist_ok=True)
parquet.write_table(table.take(order), sys.argv[2])
