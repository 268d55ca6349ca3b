//! What the program tells of itself: lines on standard error and, where an operator wants them, spans to an OpenTelemetry collector (OTLP, protobuf
//! over HTTP).
//!
//! Never waits for a collector: spans that find no room in the queue are dropped, and that exports fail is said once.

use std::io;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use anyhow::Context as _;
use opentelemetry::KeyValue;
use opentelemetry::trace::TracerProvider as _;
use opentelemetry_otlp::{Protocol, WithExportConfig as _};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::error::OTelSdkResult;
use opentelemetry_sdk::trace::{BatchSpanProcessor, SdkTracer, SdkTracerProvider, SpanData, SpanExporter};
use tracing_opentelemetry::OpenTelemetryLayer;
use tracing_subscriber::layer::{Layer as _, SubscriberExt as _};
use tracing_subscriber::util::SubscriberInitExt as _;
use tracing_subscriber::{EnvFilter, Registry, filter, reload};

use crate::error::user;

/// What spans are told under: those of requests and attempts, and no other.
pub(crate) const SPANS: &str = "nodus::span";
/// Where a collector takes spans.
const PATH: &str = "/v1/traces";
/// How long one export may take, and the last ones at the end.
const PATIENCE: Duration = Duration::from_secs(2);

type Exporting = Option<OpenTelemetryLayer<Registry, SdkTracer>>;

static IS_EXPORTING: AtomicBool = AtomicBool::new(false);
static EXPORTING: OnceLock<reload::Handle<Exporting, Registry>> = OnceLock::new();

/// Begins to tell: what this filter lets through, on standard error. Once, at the start.
pub fn begin(filter: EnvFilter, is_terminal: bool) {
    let (exporting, handle) = reload::Layer::new(None);
    let is_exported = filter::dynamic_filter_fn(|about, _| about.target() == SPANS && IS_EXPORTING.load(Relaxed));
    let lines = tracing_subscriber::fmt::layer().with_writer(io::stderr).with_ansi(is_terminal).with_target(false);
    tracing_subscriber::registry().with(exporting.with_filter(is_exported)).with(lines.with_filter(filter)).init();
    // A second start would have failed before.
    drop(EXPORTING.set(handle));
}

/// Spans on their way to a collector. Dropped, what waits is sent, if that takes no more than a moment.
pub(crate) struct Spans(SdkTracerProvider);

/// From now on spans go to the collector at this address.
///
/// # Errors
/// The user's: it is no address. Ours: the system has no thread.
pub(crate) fn export(url: &str) -> anyhow::Result<Spans> {
    let is_url = reqwest::Url::parse(url).is_ok_and(|url| matches!(url.scheme(), "http" | "https") && url.has_host());
    if !is_url {
        return Err(user(format!("otlp is `{}`, expected a collector's URL, such as http://127.0.0.1:4318", crate::text::escape(url))));
    }
    // A second installation is the same provider.
    drop(rustls::crypto::ring::default_provider().install_default());
    let base = url.trim_end_matches('/');
    let place = if base.ends_with(PATH) { base.to_owned() } else { format!("{base}{PATH}") };
    let exporter = opentelemetry_otlp::SpanExporter::builder().with_http().with_protocol(Protocol::HttpBinary);
    let exporter = exporter.with_endpoint(place).with_timeout(PATIENCE).build().context("making an exporter of spans")?;
    let about = [KeyValue::new("service.name", "nodus"), KeyValue::new("service.version", env!("CARGO_PKG_VERSION"))];
    let provider = SdkTracerProvider::builder()
        .with_span_processor(BatchSpanProcessor::builder(Told { exporter, is_failing: AtomicBool::new(false) }).build())
        .with_resource(Resource::builder_empty().with_attributes(about).build())
        .build();
    let layer = tracing_opentelemetry::layer().with_tracer(provider.tracer("nodus")).with_location(false).with_threads(false);
    let handle = EXPORTING.get().context("nothing was told to begin telling")?;
    IS_EXPORTING.store(true, Relaxed);
    handle.reload(Some(layer)).context("beginning to export spans")?;
    Ok(Spans(provider))
}

impl Drop for Spans {
    fn drop(&mut self) {
        IS_EXPORTING.store(false, Relaxed);
        // That the last spans found no collector is said where they were sent.
        drop(self.0.shutdown_with_timeout(PATIENCE));
    }
}

/// An exporter whose first failure is said, and its next success.
#[derive(Debug)]
struct Told<E> {
    exporter: E,
    is_failing: AtomicBool,
}

impl<E: SpanExporter> SpanExporter for Told<E> {
    async fn export(&self, batch: Vec<SpanData>) -> OTelSdkResult {
        let exported = self.exporter.export(batch).await;
        match (&exported, self.is_failing.swap(exported.is_err(), Relaxed)) {
            (Err(error), false) => tracing::warn!("spans cannot be exported, and are dropped until they can: {error}"),
            (Ok(()), true) => tracing::warn!("spans are exported again"),
            _ => {}
        }
        exported
    }

    fn shutdown_with_timeout(&self, timeout: Duration) -> OTelSdkResult {
        self.exporter.shutdown_with_timeout(timeout)
    }

    fn force_flush(&self) -> OTelSdkResult {
        self.exporter.force_flush()
    }

    fn set_resource(&mut self, resource: &Resource) {
        self.exporter.set_resource(resource);
    }
}

#[cfg(test)]
mod tests {
    use super::export;
    use crate::error::exit_code;

    #[test]
    fn what_is_no_address_of_a_collector_is_refused() {
        for url in ["collector", "ftp://collector", "http://", "127.0.0.1:4318"] {
            let error = export(url).map(drop).unwrap_err();
            assert!(exit_code(&error) == 2 && error.to_string().contains("4318"), "{url}: {error:#}");
        }
    }
}
