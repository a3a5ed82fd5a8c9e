"""What runs in an engine's own processes, whichever engine it is: forks, cases, patches in memory, and what ran of a change."""
