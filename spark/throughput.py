"""The throughput analysis (analysis.py) as a program for spark-submit.

    portalmq report --data-dir data/5000 --out report
    spark-submit spark/throughput.py --data-dir data/5000 --out report

Both run the same command; under spark-submit it uses the session of that cluster.
"""

from __future__ import annotations

from portalmq.spark.commands import report

if __name__ == "__main__":
    report()
