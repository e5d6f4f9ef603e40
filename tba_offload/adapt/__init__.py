"""What is learned between steps: the profile of a step, and the plan for the next one."""
