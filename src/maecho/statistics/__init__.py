"""What a client can say of its data: one table, STATISTICS, and one file for each statistic."""
