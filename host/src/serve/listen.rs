//! The address that is listened on, TLS, and the end.
//!
//! Never listens where strangers are without TLS, unless the operator insists.

use std::net::{SocketAddr, TcpListener};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use axum_server::Handle;
use axum_server::tls_rustls::RustlsConfig;
use rustls::ServerConfig;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;

use super::config::Settings;
use super::door::Door;
use super::routes;
use super::service::App;
use crate::error::user;
use crate::paths::{Paths, shown};

/// How long the first request of a connection may take to arrive.
const FIRST_REQUEST: Duration = Duration::from_secs(30);
/// How long a connection may wait for its next request, and how long the head of one may take.
const NEXT_REQUEST: Duration = Duration::from_secs(30);
/// How long answers under way may take once the service is to end.
const GRACE: Duration = Duration::from_secs(10);
/// Longest certificate or key file.
const PEM_BYTES_MAX: u64 = 1 << 20;
/// All that is spoken: HTTP/2 would add streams, header tables and resets to bound, and gains an API of few requests nothing.
const ALPN: &[u8] = b"http/1.1";

/// An address that is taken, and what is spoken there.
pub(super) struct Bound {
    listener: TcpListener,
    address: SocketAddr,
    tls: Option<Arc<ServerConfig>>,
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
/// The user's: it is taken, or is for strangers without TLS; certificate and key are none, or do not go together.
pub(super) fn bind(paths: Paths, settings: &Settings) -> anyhow::Result<Bound> {
    let tls = settings.tls.as_ref().map(|(cert, key)| tls(paths, cert, key)).transpose()?;
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

/// What TLS is spoken with.
fn tls(paths: Paths, cert: &Path, key: &Path) -> anyhow::Result<Arc<ServerConfig>> {
    // One process, one provider; a second installation is the same one.
    drop(rustls::crypto::ring::default_provider().install_default());
    let chain = CertificateDer::pem_slice_iter(&paths.read(cert, PEM_BYTES_MAX)?).collect::<Result<Vec<_>, _>>();
    let chain = chain.ok().filter(|chain| !chain.is_empty());
    let chain = chain.ok_or_else(|| user(format!("{}: expected a certificate chain as PEM, the service's own first", shown(cert))))?;
    let secret = PrivateKeyDer::from_pem_slice(&paths.read(key, PEM_BYTES_MAX)?);
    let secret = secret.map_err(|_| user(format!("{}: expected a private key as PEM, without a passphrase", shown(key))))?;
    let config = ServerConfig::builder().with_no_client_auth().with_single_cert(chain, secret);
    let mut config = config.map_err(|error| user(format!("{} and {} cannot be used together: {error}", shown(cert), shown(key))))?;
    config.alpn_protocols = vec![ALPN.to_vec()];
    Ok(config.into())
}

/// Answers requests until the process is asked to end; then those under way, and no more; asked twice, none.
///
/// # Errors
/// Ours: the listener failed.
pub(super) async fn answer(app: App, bound: Bound, to_end: watch::Receiver<u32>) -> anyhow::Result<()> {
    let door = Door::new(raise_descriptors(), bound.is_behind_proxy);
    let handle = Handle::new();
    tokio::spawn(end(app.clone(), handle.clone(), to_end));
    let service = routes::router(app).into_make_service();
    let served = match bound.tls {
        None => {
            let mut server = axum_server::from_tcp(bound.listener).context("listening")?.acceptor(door);
            server.http_builder().http1().header_read_timeout(NEXT_REQUEST);
            server.http1_only().first_request_timeout(FIRST_REQUEST).handle(handle).serve(service).await
        }
        Some(config) => {
            let server = axum_server::from_tcp_rustls(bound.listener, RustlsConfig::from_config(config)).context("listening")?;
            let mut server = server.map(|tls| tls.acceptor(door));
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

/// How often the process was asked to end so far (SIGINT, SIGTERM). Within a runtime.
pub(super) fn asked_to_end() -> watch::Receiver<u32> {
    let (tell, told) = watch::channel(0);
    tokio::spawn(async move {
        let (Ok(mut interrupt), Ok(mut terminate)) = (signal(SignalKind::interrupt()), signal(SignalKind::terminate())) else {
            // Without handlers a signal ends the process as it always does.
            return std::future::pending().await;
        };
        loop {
            tokio::select! {
                _ = interrupt.recv() => {}
                _ = terminate.recv() => {}
            }
            tell.send_modify(|count| *count += 1);
        }
    });
    told
}

/// Resolves once the process was asked to end so often.
pub(super) async fn asked(mut to_end: watch::Receiver<u32>, times: u32) {
    if to_end.wait_for(|count| *count >= times).await.is_err() {
        std::future::pending().await
    }
}

async fn end(app: App, handle: Handle<SocketAddr>, to_end: watch::Receiver<u32>) {
    asked(to_end.clone(), 1).await;
    app.closing.send_replace(true);
    handle.graceful_shutdown(Some(GRACE));
    asked(to_end, 2).await;
    handle.shutdown();
}
