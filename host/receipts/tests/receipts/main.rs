//! Receipts from end to end: sealed, checked, torn, forged.
//!
//! Knows no secret but its own: every key here is made of constants or thrown away.

#[cfg(test)]
mod envelope;
#[cfg(test)]
mod follow;
#[cfg(test)]
mod hostile;
#[cfg(test)]
mod key;
#[cfg(test)]
mod ledger;
#[cfg(test)]
mod seal;
#[cfg(test)]
mod support;
#[cfg(test)]
mod torn;
#[cfg(test)]
mod verify;
