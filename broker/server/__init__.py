"""The process of a broker: settings, start, gunicorn, secrets, metrics, logs."""
