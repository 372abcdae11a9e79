"""Tables and figures of the paper: data, partition, training, networks, configs, runs, plots."""
