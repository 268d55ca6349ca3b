//! Weights of a model on a card, once for several processes: the first that asks makes them, the others are handed them.
//!
//! Never holds memory of the card that no process uses, and never lets two make the same weights: the card's memory is planned for one copy.

use std::io::{self, Read as _, Write as _};
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use nodus_kernels::{SharedPlace, SharedWeights};
use nodus_protocol::frame::{decode, encode};
use serde::{Deserialize, Serialize};
use tokio::sync::oneshot;

use super::handover::{AT_ONCE_MAX, give, take};

/// Bytes of a table at most: some hundred thousand weights.
const TABLE_BYTES_MAX: u32 = 16 << 20;

/// The parent's part: keeps what the first process made for those that come after it.
#[derive(Debug, Default)]
pub(crate) struct Keeper {
    kept: Mutex<Kept>,
    /// Whether there is something new for those that wait.
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Kept {
    weights: Option<Arc<SharedWeights>>,
    users: usize,
    /// Whether somebody is at making them.
    is_making: bool,
}

impl Keeper {
    /// A socket for one more process, and what resolves when the process has its answer there, be it that it is to make the weights. A thread answers
    /// at the other end until the process is gone. Who makes them and hangs is waited for until somebody ends it.
    ///
    /// # Errors
    /// What the operating system says.
    pub(crate) fn link(self: &Arc<Self>) -> io::Result<(UnixStream, oneshot::Receiver<()>)> {
        let (ours, theirs) = UnixStream::pair()?;
        let (teller, answered) = oneshot::channel();
        let keeper = self.clone();
        let attend = move || {
            if let Err(error) = keeper.attend(&ours, teller) {
                tracing::warn!("weights could not be shared with a process: {error}");
            }
        };
        std::thread::Builder::new().name("weights".into()).spawn(attend)?;
        Ok((theirs, answered))
    }

    fn attend(&self, mut stream: &UnixStream, teller: oneshot::Sender<()>) -> io::Result<()> {
        let weights = self.weights();
        // Nobody may want to know.
        let _ = teller.send(());
        let _user = match weights {
            Ok(weights) => {
                let user = User(self);
                send(stream, Some(&weights))?;
                user
            }
            Err(turn) => {
                send(stream, None)?;
                turn.end(receive(stream)?)
            }
        };
        // Nothing more is said; the stream ends with the process.
        stream.read(&mut [0]).map(drop)
    }

    /// The weights, used by one more. Else it is the turn of who asks to make them. Waits for one that is at it.
    fn weights(&self) -> Result<Arc<SharedWeights>, Turn<'_>> {
        let mut kept = self.kept();
        loop {
            if let Some(weights) = kept.weights.clone() {
                kept.users += 1;
                return Ok(weights);
            }
            if !kept.is_making {
                kept.is_making = true;
                return Err(Turn(self));
            }
            kept = self.changed.wait(kept).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn kept(&self) -> MutexGuard<'_, Kept> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Somebody's turn to make the weights; dropped, it is the next one's.
struct Turn<'a>(&'a Keeper);

impl<'a> Turn<'a> {
    /// What came of it.
    fn end(self, made: Option<SharedWeights>) -> User<'a> {
        let mut kept = self.0.kept();
        kept.weights = made.map(Arc::new);
        kept.users += 1;
        User(self.0)
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.0.kept().is_making = false;
        self.0.changed.notify_all();
    }
}

/// One that uses the weights.
struct User<'a>(&'a Keeper);

impl Drop for User<'_> {
    fn drop(&mut self) {
        let mut kept = self.0.kept();
        kept.users -= 1;
        if kept.users == 0 {
            kept.weights = None;
        }
    }
}

/// A process's part: held as long as it uses the weights.
#[derive(Debug)]
pub(crate) struct Link(UnixStream);

impl Link {
    pub(crate) fn new(stream: UnixStream) -> Self {
        Self(stream)
    }

    /// The weights that another process made. Without any they are to be made, and [`Link::tell`] says what came of it. Waits for a process that is
    /// at it.
    ///
    /// # Errors
    /// The parent is gone.
    pub(crate) fn ask(&self) -> io::Result<Option<SharedWeights>> {
        receive(&self.0)
    }

    /// Hands over what was made; nothing where this card cannot.
    ///
    /// # Errors
    /// The parent is gone.
    pub(crate) fn tell(&self, made: Option<&SharedWeights>) -> io::Result<()> {
        send(&self.0, made)
    }
}

/// What goes before the descriptors.
#[derive(Serialize, Deserialize)]
struct Table {
    extent_bytes: Vec<u64>,
    places: Vec<(u64, u64, u64)>,
}

fn send(mut stream: &UnixStream, weights: Option<&SharedWeights>) -> io::Result<()> {
    let table = weights.map(|weights| Table {
        extent_bytes: weights.extents.iter().map(|(_, bytes)| *bytes).collect(),
        places: weights.places.iter().map(|place| (place.extent, place.first, place.bytes)).collect(),
    });
    let bytes = encode(&table).map_err(io::Error::other)?;
    let length = u32::try_from(bytes.len()).ok().filter(|length| *length <= TABLE_BYTES_MAX);
    let length = length.ok_or_else(|| io::Error::other("the table of weights is too long"))?;
    stream.write_all(&length.to_le_bytes())?;
    stream.write_all(&bytes)?;
    for some in weights.map_or(&[][..], |weights| &weights.extents).chunks(AT_ONCE_MAX) {
        give(stream, &some.iter().map(|(descriptor, _)| descriptor.as_fd()).collect::<Vec<_>>())?;
    }
    Ok(())
}

fn receive(mut stream: &UnixStream) -> io::Result<Option<SharedWeights>> {
    let invalid = |what: &'static str| io::Error::new(io::ErrorKind::InvalidData, what);
    let mut length = [0; 4];
    stream.read_exact(&mut length)?;
    let length = u32::from_le_bytes(length);
    if length > TABLE_BYTES_MAX {
        return Err(invalid("the table of weights is too long"));
    }
    let mut bytes = Vec::new();
    stream.take(length.into()).read_to_end(&mut bytes)?;
    let table: Option<Table> = decode(&bytes).map_err(|_| invalid("no table of weights"))?;
    let Some(Table { extent_bytes, places }) = table else { return Ok(None) };
    let mut descriptors: Vec<OwnedFd> = Vec::new();
    while descriptors.len() < extent_bytes.len() {
        descriptors.extend(take(stream)?);
    }
    if descriptors.len() > extent_bytes.len() {
        return Err(invalid("more memory came than the table of weights has"));
    }
    let places = places.into_iter().map(|(extent, first, bytes)| SharedPlace { extent, first, bytes }).collect();
    Ok(Some(SharedWeights { extents: descriptors.into_iter().zip(extent_bytes).collect(), places }))
}

#[cfg(test)]
#[expect(clippy::disallowed_methods, reason = "any open file stands for memory of a card")]
mod tests {
    use std::fs::File;
    use std::sync::mpsc::channel;
    use std::time::Duration;

    use super::*;

    fn made(extents: u64) -> SharedWeights {
        let extents = (0..extents).map(|number| (OwnedFd::from(File::open("/dev/null").unwrap()), number)).collect();
        SharedWeights { extents, places: vec![SharedPlace { extent: 2, first: 512, bytes: 7 }] }
    }

    fn link(keeper: &Arc<Keeper>) -> Link {
        Link::new(keeper.link().unwrap().0)
    }

    #[test]
    fn the_first_makes_them_and_the_others_wait_and_are_handed_all() {
        let keeper = Arc::new(Keeper::default());
        let first = link(&keeper);
        assert!(first.ask().unwrap().is_none());
        let (second, (says, hears)) = (link(&keeper), channel());
        let asking = std::thread::spawn(move || {
            says.send(second.ask().unwrap().unwrap()).unwrap();
            second
        });
        assert!(hears.recv_timeout(Duration::from_millis(50)).is_err(), "handed over before they were made");
        first.tell(Some(&made(300))).unwrap();
        let weights = hears.recv().unwrap();
        assert!(weights.extents.iter().map(|(_, bytes)| *bytes).eq(0..300));
        assert_eq!(weights.places, made(0).places);
        // They outlive the one that made them, and go with the last.
        drop(first);
        let second = asking.join().unwrap();
        assert!(link(&keeper).ask().unwrap().is_some());
        drop(second);
        while keeper.kept().weights.is_some() {
            std::thread::sleep(Duration::from_millis(1));
        }
        assert!(link(&keeper).ask().unwrap().is_none());
    }

    #[test]
    fn after_one_that_fails_or_cannot_share_the_next_makes_them() {
        let keeper = Arc::new(Keeper::default());
        let fails = link(&keeper);
        assert!(fails.ask().unwrap().is_none());
        drop(fails);
        let cannot = link(&keeper);
        assert!(cannot.ask().unwrap().is_none());
        cannot.tell(None).unwrap();
        assert!(link(&keeper).ask().unwrap().is_none());
    }

    /// One that hangs while it makes them: the others wait until it is ended, and then one of them makes them, since there is room for one copy.
    #[test]
    fn nobody_makes_them_while_another_is_at_it() {
        let keeper = Arc::new(Keeper::default());
        let hangs = link(&keeper);
        assert!(hangs.ask().unwrap().is_none());
        let (says, hears) = channel();
        for (stream, mut answered) in [keeper.link().unwrap(), keeper.link().unwrap()] {
            let (says, other) = (says.clone(), Link::new(stream));
            std::thread::spawn(move || {
                let was_early = answered.try_recv().is_ok();
                let got = other.ask().unwrap();
                let was_told = answered.blocking_recv().is_ok();
                if got.is_none() {
                    other.tell(Some(&made(2))).unwrap();
                }
                // The link lives as long as somebody listens.
                says.send((got.is_none(), was_told && !was_early, other)).unwrap();
            });
        }
        assert!(hears.recv_timeout(Duration::from_millis(1500)).is_err(), "a second one makes what there is room for once");
        drop(hangs);
        let others = [(); 2].map(|()| hears.recv_timeout(Duration::from_secs(60)).expect("it waits for one that is gone"));
        assert_eq!(others.iter().filter(|(is_maker, ..)| *is_maker).count(), 1, "one makes them, and the other has them of it");
        assert!(others.iter().all(|(_, was_told_in_time, _)| *was_told_in_time), "who watches them knows when they wait no more");
    }
}
