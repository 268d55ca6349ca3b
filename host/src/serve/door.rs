//! Who may have a connection: so many in all, so many from one address, and none that stops reading.
//!
//! Knows no request and no token: whoever connects is a stranger.

use std::collections::HashMap;
use std::future::{Ready, ready};
use std::io;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use axum_server::accept::Accept;
use tokio::net::TcpStream;
use tower::Service;

use super::gauges;

/// How long what was sent may stay unread before the connection is cut.
const UNREAD: Duration = Duration::from_secs(60);
/// Descriptors that are kept for files, engines and guests: half of those that there are, and no more than this.
const KEPT_MAX: usize = 1024;

/// Lets connections in, and counts them.
#[derive(Clone)]
pub(super) struct Door(Arc<Counts>);

struct Counts {
    all_max: usize,
    of_one_max: usize,
    taken: Mutex<Taken>,
}

#[derive(Default)]
struct Taken {
    all: usize,
    by_address: HashMap<IpAddr, usize>,
}

/// A connection's place; given back when it is dropped.
struct Place {
    counts: Arc<Counts>,
    from: IpAddr,
}

impl Door {
    /// Of a process that may have so many files open. One address has three quarters of the places, so that no stranger has all; behind a proxy all
    /// come from one.
    pub(super) fn new(descriptors: usize, is_behind_proxy: bool) -> Self {
        let all_max = descriptors - (descriptors / 2).min(KEPT_MAX);
        let of_one_max = if is_behind_proxy { all_max } else { all_max - all_max / 4 };
        Self(Arc::new(Counts { all_max, of_one_max, taken: Mutex::default() }))
    }

    fn enter(&self, from: IpAddr) -> Option<Place> {
        let mut taken = self.0.taken();
        let own = taken.by_address.get(&from).copied().unwrap_or(0);
        if taken.all >= self.0.all_max || own >= self.0.of_one_max {
            return None;
        }
        taken.all += 1;
        taken.by_address.insert(from, own + 1);
        Some(Place { counts: self.0.clone(), from })
    }
}

impl Counts {
    fn taken(&self) -> MutexGuard<'_, Taken> {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut taken = self.counts.taken();
        taken.all -= 1;
        if let Some(count) = taken.by_address.get_mut(&self.from) {
            *count -= 1;
            if *count == 0 {
                taken.by_address.remove(&self.from);
            }
        }
    }
}

impl<S> Accept<TcpStream, S> for Door {
    type Stream = TcpStream;
    type Service = Seated<S>;
    type Future = Ready<io::Result<(TcpStream, Seated<S>)>>;

    fn accept(&self, stream: TcpStream, inner: S) -> Self::Future {
        let accept = || {
            let Some(place) = self.enter(stream.peer_addr()?.ip()) else {
                gauges::turned_away();
                return Err(io::Error::other("there is no place for another connection"));
            };
            #[cfg(target_os = "linux")]
            rustix::net::sockopt::set_tcp_user_timeout(&stream, u32::try_from(UNREAD.as_millis()).unwrap_or(u32::MAX))?;
            Ok((stream, Seated { inner, _place: Arc::new(place) }))
        };
        ready(accept())
    }
}

/// What answers a connection's requests, and holds its place as long as it is there.
#[derive(Clone)]
pub(super) struct Seated<S> {
    inner: S,
    _place: Arc<Place>,
}

impl<R, S: Service<R>> Service<R> for Seated<S> {
    type Response = S::Response;
    type Error = S::Error;
    type Future = S::Future;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: R) -> S::Future {
        self.inner.call(request)
    }
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use axum_server::accept::Accept as _;
    use tokio::net::{TcpListener, TcpStream};

    use super::{Door, KEPT_MAX, Place};

    #[test]
    fn no_address_has_all_places_and_descriptors_are_kept_back() {
        let address = |last: u8| IpAddr::from([127, 0, 0, last]);
        let enter = |door: &Door, last: u8| std::iter::from_fn(|| door.enter(address(last))).collect::<Vec<Place>>();
        let door = Door::new(16, false);
        let first = enter(&door, 1);
        assert_eq!((first.len(), enter(&door, 2).len()), (6, 2));
        let second = enter(&door, 2);
        assert!(second.len() == 2 && door.enter(address(3)).is_none());
        drop((first, second));
        assert!(door.0.taken().all == 0 && door.0.taken().by_address.is_empty());
        assert_eq!(enter(&Door::new(16, true), 1).len(), 8);
        assert_eq!(enter(&Door::new(20_000, true), 1).len(), 20_000 - KEPT_MAX);
    }

    #[tokio::test]
    async fn a_place_is_held_as_long_as_its_connection() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let door = Door::new(2, true);
        let connect = async || {
            let address = listener.local_addr().unwrap();
            let (_client, accepted) = tokio::join!(TcpStream::connect(address), listener.accept());
            door.accept(accepted.unwrap().0, ()).await
        };
        let (stream, seated) = connect().await.unwrap();
        let of_a_request = seated.clone();
        drop(seated);
        assert!(connect().await.is_err());
        #[cfg(target_os = "linux")]
        assert_eq!(rustix::net::sockopt::tcp_user_timeout(&stream).unwrap(), 60_000);
        drop((stream, of_a_request));
        connect().await.unwrap();
    }
}
