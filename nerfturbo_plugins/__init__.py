"""nerfturbo inside other frameworks. Each module is found by its framework, through an entry point of this package, and
imports it: nothing here is needed to use nerfturbo by itself."""
