//! pruner
