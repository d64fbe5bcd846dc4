"""The command line. Data goes to stdout, talk to stderr; this room imports only the ground floor.

Commands of the other rooms (a broker, a benchmark) come in by the entry-point group `portalmq.commands`.
"""
