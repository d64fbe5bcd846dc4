"""What each sensor measured on average in each minute: a streaming query over a queue, its results in Parquet.

    portalmq dev 5000 &
    python demo_iot/sensor.py temp 1 0.1 &
    python docs/examples/spark_averages.py

It handles what is there, and ends; run it again, every few minutes say, and it goes on where it stopped: its place in
the queue and the minutes that are not over yet stand in the checkpoint. Each minute comes out once, when nothing can
come for it any more, also when the program is killed half way. For a query that stays, take away `.trigger(...)`.

As a notebook: each `# %%` begins a cell.
"""

# %% Settings
import os
import sys

from pyspark.sql import SparkSession
from pyspark.sql import functions as F

import portalmq.spark
from portalmq.spark.session import java_home

BOOTSTRAP = os.environ.get("PORTALMQ_URL", "http://localhost:5000")
TOPIC = os.environ.get("TOPIC", "temp_1")  # or several: temp_1,temp_2
OUT = os.environ.get("OUT", "averages")
WINDOW = os.environ.get("WINDOW", "1 minute")
LATE = os.environ.get("LATE", "10 seconds")  # how long after its end a minute waits for readings

# %% A session that knows the queue
os.environ.setdefault("PYSPARK_PYTHON", sys.executable)  # Spark's workers need this environment's packages
if home := java_home():
    os.environ["JAVA_HOME"] = home  # the Java that came with portalmq[spark], on a machine that has none of its own
spark = (
    SparkSession.builder.appName("averages")
    .config("spark.sql.shuffle.partitions", "4")  # as many stores of state: a handful of sensors needs no 200
    .config("spark.ui.showConsoleProgress", "false")
    .getOrCreate()
)
spark.sparkContext.setLogLevel("ERROR")
portalmq.spark.register(spark)

# %% Messages, from the first one on
messages = (
    spark.readStream.format("portalmq")
    .option("bootstrap", BOOTSTRAP)
    .option("topic", TOPIC)
    .option("startingOffsets", "earliest")
    .option("columns", "value,timestamp")
    .load()
)

# %% Readings: `timestamp` is when the queue took the message, and never falls within a partition
reading = F.from_json(F.col("value").cast("string"), "sensor STRING, station STRING, unit STRING, value DOUBLE")
readings = messages.select("timestamp", reading.alias("reading")).select("timestamp", "reading.*")

# %% Averages. A gap of the measurement has no value, and counts as a reading all the same
averages = (
    readings.withWatermark("timestamp", LATE)
    .groupBy(F.window("timestamp", WINDOW), "sensor", "station", "unit")
    .agg(F.avg("value").alias("average"), F.count("*").alias("readings"), F.count("value").alias("measured"))
    .select(F.col("window.start").alias("minute"), "sensor", "station", "average", "unit", "readings", "measured")
)

# %% Handle what is there
query = (
    averages.writeStream.format("parquet")
    .option("path", f"{OUT}/parquet")
    .option("checkpointLocation", f"{OUT}/checkpoint")
    .outputMode("append")
    .trigger(availableNow=True)
    .start()
)
query.awaitTermination()

# %% The result. There is none before the first minute is over
result = spark.read.schema(averages.schema).parquet(f"{OUT}/parquet").orderBy("minute", "sensor")
result.show(truncate=False)
