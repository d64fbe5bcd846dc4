"""The throughput report: its figures (model), and the page that shows them."""
