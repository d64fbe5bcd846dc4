"""`python server.py PORT`: the same as `portalmq broker PORT`."""

from portalmq.broker.server.commands import broker

if __name__ == "__main__":
    broker(prog_name="server.py")
