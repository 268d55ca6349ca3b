//! nodus-host.
