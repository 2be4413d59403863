"""Other ways to batch, as planner functions: without exchange, and as other frameworks do it, by public descriptions."""
