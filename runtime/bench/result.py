"""Results of the benchmarks as files, which are committed."""

import json
from pathlib import Path
from typing import Any


def save(result: dict[str, Any], path: Path) -> None:
    """Write the object as JSON, one row on a line."""
    rows = ",\n  ".join(json.dumps(row) for row in result["rows"])
    head = json.dumps({key: value for key, value in result.items() if key != "rows"}, indent=1)
    path.write_text(f'{head[:-2]},\n "rows": [\n  {rows}\n ]\n}}\n')
