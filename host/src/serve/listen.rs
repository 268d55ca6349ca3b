//! The address that is listened on, TLS, and the end.
//!
//! Never listens where strangers are without TLS, unless the operator insists.

use std::net::{SocketAddr, TcpListener};
use std::path::PathBuf;
use std::time::Duration;

use anyhow::Context as _;
use axum_server::Handle;
use axum_server::tls_rustls::RustlsConfig;
use tokio::signal::unix::{SignalKind, signal};

use super::config::Settings;
use super::door::Door;
use super::routes;
use super::service::App;
use crate::error::user;
use crate::paths::Paths;

/// How long the first request of a connection may take to arrive.
const FIRST_REQUEST: Duration = Duration::from_secs(30);
/// How long a connection may wait for its next request, and how long the head of one may take.
const NEXT_REQUEST: Duration = Duration::from_secs(30);
/// How long answers under way may take once the service is to end.
const GRACE: Duration = Duration::from_secs(10);
/// Longest certificate or key file.
const PEM_BYTES_MAX: u64 = 1 << 20;

/// An address that is taken, and what is spoken there.
pub(super) struct Bound {
    listener: TcpListener,
    address: SocketAddr,
    tls: Option<(Vec<u8>, Vec<u8>)>,
    /// Whether others speak TLS in front of it, and all connections are theirs.
    is_behind_proxy: bool,
}

impl Bound {
    pub(super) fn url(&self) -> String {
        format!("{}://{}", if self.tls.is_some() { "https" } else { "http" }, self.address)
    }
}

/// Takes the address.
///
/// # Errors
/// The user's: it is taken, or is for strangers without TLS.
pub(super) fn bind(paths: Paths, settings: &Settings) -> anyhow::Result<Bound> {
    let read = |(cert, key): &(PathBuf, PathBuf)| anyhow::Ok((paths.read(cert, PEM_BYTES_MAX)?, paths.read(key, PEM_BYTES_MAX)?));
    let tls = settings.tls.as_ref().map(read).transpose()?;
    if tls.is_none() && !settings.listen.ip().is_loopback() && !settings.is_insecure {
        return Err(user(format!(
            "{} can be reached by others, and tokens would travel in the clear: give --tls-cert and --tls-key, or --insecure behind a proxy that speaks TLS",
            settings.listen
        )));
    }
    #[expect(clippy::disallowed_methods, reason = "the one address that the operator named")]
    let listener = TcpListener::bind(settings.listen).map_err(|error| user(format!("cannot listen on {}: {error}", settings.listen)))?;
    let address = listener.local_addr().context("asking for the address that is listened on")?;
    Ok(Bound { listener, address, tls, is_behind_proxy: settings.is_insecure })
}

/// Answers requests until the process is asked to end (SIGINT, SIGTERM); then those under way, and no more.
///
/// # Errors
/// The user's: certificate and key do not go together. Ours: the listener failed.
pub(super) async fn answer(app: App, bound: Bound) -> anyhow::Result<()> {
    let door = Door::new(raise_descriptors(), bound.is_behind_proxy);
    let handle = Handle::new();
    tokio::spawn(end(app.clone(), handle.clone()));
    let service = routes::router(app).into_make_service();
    let served = match bound.tls {
        None => {
            let mut server = axum_server::from_tcp(bound.listener).context("listening")?.acceptor(door);
            server.http_builder().http1().header_read_timeout(NEXT_REQUEST);
            server.http1_only().first_request_timeout(FIRST_REQUEST).handle(handle).serve(service).await
        }
        Some((cert, key)) => {
            // One process, one provider; a second installation is the same one.
            drop(rustls::crypto::ring::default_provider().install_default());
            let config = RustlsConfig::from_pem(cert, key).await;
            let config = config.map_err(|error| user(format!("the certificate and its key cannot be used: {error}")))?;
            let mut server = axum_server::from_tcp_rustls(bound.listener, config).context("listening")?.map(|tls| tls.acceptor(door));
            server.http_builder().http1().header_read_timeout(NEXT_REQUEST);
            server.http1_only().first_request_timeout(FIRST_REQUEST).handle(handle).serve(service).await
        }
    };
    served.context("serving")
}

/// Every connection is a descriptor, and what a process gets without a word is meant for programs with few. How many it has.
fn raise_descriptors() -> usize {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    let raised = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum });
    let has = raised.map_or_else(
        |error| {
            tracing::warn!("the number of open files stays as it is: {error}");
            current
        },
        |()| maximum,
    );
    has.and_then(|count| usize::try_from(count).ok()).unwrap_or(usize::MAX)
}

async fn end(app: App, handle: Handle<SocketAddr>) {
    let (Ok(mut interrupt), Ok(mut terminate)) = (signal(SignalKind::interrupt()), signal(SignalKind::terminate())) else {
        // Without handlers a signal ends the process as it always does.
        return;
    };
    tokio::select! {
        _ = interrupt.recv() => {}
        _ = terminate.recv() => {}
    }
    app.closing.send_replace(true);
    handle.graceful_shutdown(Some(GRACE));
}
