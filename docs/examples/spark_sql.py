"""A year of weather out of a queue, asked in SQL.

    portalmq dev 5000 &
    for station in 1 2 3; do python demo_iot/sensor.py temp $station 0.001 --count 2000; done
    portalmq consume temp_1 --group weather --from-beginning -n 2000 > weather.txt
    python docs/examples/spark_sql.py

A batch query reads what is committed when it is planned. With the data directories of the brokers at hand, name them
by the option `path` instead of `bootstrap`: the rows are the same, and come several times as fast.

As a notebook: each `# %%` begins a cell.
"""

# %% Settings
import os
import sys

from pyspark.sql import SparkSession

import portalmq.spark
from portalmq.spark.session import java_home

BOOTSTRAP = os.environ.get("PORTALMQ_URL", "http://localhost:5000")
TOPIC = os.environ.get("TOPIC", "temp_1,temp_2,temp_3")
DATA = os.environ.get("DATA", "data/5000")  # the broker's data directory, where this program can see it

# %% A session that knows the queue
os.environ.setdefault("PYSPARK_PYTHON", sys.executable)  # Spark's workers need this environment's packages
if home := java_home():
    os.environ["JAVA_HOME"] = home  # the Java that came with portalmq[spark], on a machine that has none of its own
spark = SparkSession.builder.appName("weather").config("spark.ui.showConsoleProgress", "false").getOrCreate()
spark.sparkContext.setLogLevel("ERROR")
spark.conf.set("spark.sql.session.timeZone", "UTC")
portalmq.spark.register(spark)

# %% The topics as a view
messages = spark.read.format("portalmq").option("bootstrap", BOOTSTRAP).option("topic", TOPIC).load()
messages.createOrReplaceTempView("messages")

# %% Readings: the JSON of a message as columns
readings = spark.sql("""
    SELECT topic, partition, offset, timestamp, reading.*
    FROM (
        SELECT *, from_json(CAST(value AS STRING), 'sensor STRING, station STRING, value DOUBLE, measured_at TIMESTAMP')
               AS reading
        FROM messages
        WHERE content_type = 'application/json'
    )
""")
readings.createOrReplaceTempView("readings")

# %% Statistics of each station
stations = spark.sql("""
    SELECT station, count(*) AS readings, count(*) - count(value) AS gaps,
           round(min(value), 1) AS coldest, round(avg(value), 1) AS average, round(max(value), 1) AS warmest,
           percentile(value, 0.5) AS median
    FROM readings GROUP BY station ORDER BY station
""")
stations.show()

# %% The coldest day of each station, by its average
days = spark.sql("""
    SELECT station, day, round(average, 1) AS average
    FROM (
        SELECT *, row_number() OVER (PARTITION BY station ORDER BY average, day) AS place
        FROM (SELECT station, date(measured_at) AS day, avg(value) AS average FROM readings GROUP BY ALL)
    )
    WHERE place = 1 ORDER BY station
""")
days.show()

# %% The queue itself: where the messages lie, and how fast they came
queue = spark.sql("""
    SELECT topic, partition, count(*) AS messages, min(offset) AS first, max(offset) AS last,
           round(count(*) / greatest(1, unix_timestamp(max(timestamp)) - unix_timestamp(min(timestamp)))) AS per_s
    FROM messages GROUP BY topic, partition ORDER BY topic, partition
""")
queue.show()

# %% What became of the messages. This is not in the messages: it needs the files
if os.path.isdir(DATA):
    deliveries = (
        spark.read.format("portalmq").option("path", DATA).option("topic", TOPIC).option("table", "deliveries").load()
    )
    deliveries.createOrReplaceTempView("deliveries")
    handled = spark.sql("""
        SELECT topic, `group`, event, sum(messages) AS messages,
               max(unix_millis(at) - unix_millis(available_at)) AS slowest_ms
        FROM deliveries WHERE event IN ('granted', 'acked', 'nacked', 'dead')
        GROUP BY ALL ORDER BY topic, `group`, event
    """)
    handled.show()
