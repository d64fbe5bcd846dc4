"""The command line. Data goes to stdout, messages for people to stderr. It imports only the client.

Commands of other packages (a broker, a benchmark) are entry points of the group `portalmq.commands`.
"""
