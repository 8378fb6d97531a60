"""Running requests: engine, scheduler, plans and their runner, batch context, memory."""
