"""What tests of several rooms share."""

import signal

from hypothesis import HealthCheck, settings
from support.zookeeper import zookeeper_server

__all__ = ["zookeeper_server"]

# How long an example takes says how busy the machine is. What is too slow for good meets the time limit of its test.
settings.register_profile("portalmq", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("portalmq")

# A shell starts what is to run in the background with Ctrl-C ignored, which every process below would inherit: so would
# the commands that tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
