//! The service's settings: a TOML file, and the command line over it.
//!
//! Refuses a key that it does not know, and names the nearest that it does.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use toml::{Table, Value};

use crate::cli::{ReadyMade, ServeArgs};
use crate::error::{exit_code, user};
use crate::paths::{Paths, shown};
use crate::text::{escape, nearest};

/// Longest file.
const BYTES_MAX: u64 = 1 << 20;
/// Every key of a file.
const KEYS: [&str; 6] = ["listen", "tls_cert", "tls_key", "insecure", "offer_merged", "components"];
/// Where it listens without a word.
const LISTEN: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(std::net::Ipv4Addr::LOCALHOST), 7643);

/// What the operator wants.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Settings {
    pub(super) listen: SocketAddr,
    /// Certificate chain and private key.
    pub(super) tls: Option<(PathBuf, PathBuf)>,
    pub(super) is_insecure: bool,
    pub(super) offers_merged: bool,
    pub(super) components: Vec<ReadyMade>,
}

/// The command line's, over the file's where one is named.
///
/// # Errors
/// The user's: what is wrong with the file.
pub(super) fn settings(paths: Paths, args: &ServeArgs) -> anyhow::Result<Settings> {
    let file = match &args.config {
        None => File::default(),
        Some(path) => {
            let within = |error: anyhow::Error| if exit_code(&error) == 2 { user(format!("{}: {error}", shown(path))) } else { error };
            let text = String::from_utf8(paths.read(path, BYTES_MAX)?).map_err(|_| within(user("not UTF-8")))?;
            file(&text, path.parent().unwrap_or(Path::new(""))).map_err(within)?
        }
    };
    let tls = match (args.tls_cert.clone().or(file.tls_cert), args.tls_key.clone().or(file.tls_key)) {
        (Some(cert), Some(key)) => Some((cert, key)),
        (None, None) => None,
        _ => return Err(user("TLS needs both a certificate and its key, expected tls_cert and tls_key")),
    };
    // One that the command line names too is the command line's.
    let mut components = args.components.clone();
    components.extend(file.components.into_iter().filter(|made| args.components.iter().all(|given| given.name != made.name)));
    let listen = args.listen.or(file.listen).unwrap_or(LISTEN);
    let (is_insecure, offers_merged) = (args.insecure || file.insecure, args.offer_merged || file.offer_merged);
    Ok(Settings { listen, tls, is_insecure, offers_merged, components })
}

#[derive(Debug, Default)]
struct File {
    listen: Option<SocketAddr>,
    tls_cert: Option<PathBuf>,
    tls_key: Option<PathBuf>,
    insecure: bool,
    offer_merged: bool,
    components: Vec<ReadyMade>,
}

/// Paths are relative to the file's folder.
fn file(text: &str, folder: &Path) -> anyhow::Result<File> {
    let table: Table = text.parse().map_err(|error| user(format!("not TOML: {error}")))?;
    let mut file = File::default();
    for (key, value) in table {
        let wrong = |expected: &str| user(format!("`{key}` is {}, expected {expected}", escape(&value.to_string())));
        let path = || value.as_str().map(|path| folder.join(path)).ok_or_else(|| wrong("a path"));
        match key.as_str() {
            "listen" => {
                let address = value.as_str().and_then(|text| text.parse().ok());
                file.listen = Some(address.ok_or_else(|| wrong("an address and a port, such as \"127.0.0.1:7643\""))?);
            }
            "tls_cert" => file.tls_cert = Some(path()?),
            "tls_key" => file.tls_key = Some(path()?),
            "insecure" => file.insecure = value.as_bool().ok_or_else(|| wrong("true or false"))?,
            "offer_merged" => file.offer_merged = value.as_bool().ok_or_else(|| wrong("true or false"))?,
            "components" => file.components = components(value.as_table().ok_or_else(|| wrong("a table of names and paths"))?, folder)?,
            other => {
                let hint = nearest(other, &KEYS)
                    .map_or_else(|| format!("expected one of {}", KEYS.join(", ")), |near| format!("did you mean `{near}`?"));
                return Err(user(format!("there is no key `{}`; {hint}", escape(other))));
            }
        }
    }
    Ok(file)
}

fn components(table: &Table, folder: &Path) -> anyhow::Result<Vec<ReadyMade>> {
    let component = |(name, path): (&String, &Value)| {
        let path = path.as_str().ok_or_else(|| user(format!("`components.{}` is no path", escape(name))))?;
        let name = name.parse().map_err(|error: crate::name::NameError| user(format!("components: {error}")))?;
        Ok(ReadyMade { name, path: folder.join(path) })
    };
    table.iter().map(component).collect()
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::{KEYS, file, settings};
    use crate::cli::ServeArgs;
    use crate::paths::Paths;

    const TEXT: &str = "listen = \"0.0.0.0:80\"\ntls_cert = \"cert.pem\"\ntls_key = \"/key.pem\"\ninsecure = true\noffer_merged = true\n[components]\nsft = \"sft.wasm\"\neval = \"eval.wasm\"\n";

    #[test]
    fn every_key_is_read_and_the_command_line_goes_first() {
        assert!(KEYS.iter().all(|key| TEXT.contains(key)));
        let root = tempfile::tempdir().unwrap();
        let paths = Paths::new(cap_std::ambient_authority());
        paths.open_dir(root.path()).unwrap().write("serve.toml", TEXT).unwrap();
        let args = ServeArgs { config: Some(root.path().join("serve.toml")), ..ServeArgs::default() };
        let read = settings(paths, &args).unwrap();
        assert_eq!(read.listen.to_string(), "0.0.0.0:80");
        assert_eq!(read.tls.unwrap(), (root.path().join("cert.pem"), "/key.pem".into()));
        assert!(
            read.is_insecure && read.offers_merged && read.components.len() == 2 && read.components[1].path == root.path().join("sft.wasm")
        );
        let listen = Some("127.0.0.1:0".parse().unwrap());
        let args = ServeArgs { listen, components: vec!["sft=own.wasm".parse().unwrap()], ..args };
        let read = settings(paths, &args).unwrap();
        assert_eq!((Some(read.listen), read.components.len(), read.components[0].path.as_path()), (listen, 2, Path::new("own.wasm")));
        assert_eq!(settings(paths, &ServeArgs::default()).unwrap().listen.to_string(), "127.0.0.1:7643");
    }

    #[test]
    fn what_is_wrong_is_named_with_what_would_be_right() {
        for (text, words) in [
            ("listn = \"x\"", "did you mean `listen`?"),
            ("xyzzy = 1", "expected one of listen, tls_cert"),
            ("listen = 80", "\"127.0.0.1:7643\""),
            ("insecure = \"yes\"", "true or false"),
            ("components = 3", "a table"),
            ("[components]\n\"../x\" = \"y\"", "cannot be a name"),
            ("listen = ", "not TOML"),
        ] {
            let error = file(text, Path::new("")).unwrap_err().to_string();
            assert!(error.contains(words), "{text}: {error}");
        }
    }
}
