"""What a token costs on its way out of the server, and how late its event loop is: 64 and 256 streams of an
engine that computes nothing.

    python benchmarks/front_end_cost.py [MODEL]      # of MODEL only the tokenizer and the template are used

Prints a table, then one line of JSON.
"""

from __future__ import annotations

import json
import sys

from mainspring.bench import front_end

figures = front_end.measure(sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m")
print(front_end.table(figures))
print(json.dumps(figures))
