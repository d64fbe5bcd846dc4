"""Recurring messages: schedules, and the ticks that the leaders of their partitions append."""
