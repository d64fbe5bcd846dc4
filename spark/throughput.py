"""The program of the throughput analysis (analysis.py), for spark-submit.

    portalmq report --data-dir data/5000 --out report
    spark-submit spark/throughput.py --data-dir data/5000 --out report

Both are the same command; under spark-submit its session is used, whatever cluster that is of.
"""

from __future__ import annotations

from portalmq.spark.commands import report

if __name__ == "__main__":
    report()
