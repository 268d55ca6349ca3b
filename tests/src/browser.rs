//! A headless Chromium, driven by the WebDriver protocol: <https://www.w3.org/TR/webdriver2/>.
//!
//! Never reaches past it: what a test knows of a page is what its reader sees, and what the browser says that it asked for.

use std::collections::BTreeSet;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpStream;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

/// How long anything may take that is waited for.
const PATIENCE: Duration = Duration::from_secs(60);

/// Keys that write nothing, as the protocol names them.
pub mod keys {
    /// To the next thing that takes the keyboard.
    pub const TAB: &str = "\u{e004}";
    /// As it is pressed.
    pub const ENTER: &str = "\u{e007}";
}

/// A browser with one empty page. Dropped, it is gone.
pub struct Browser {
    driver: Child,
    port: u16,
    session: String,
    /// Closed, it would end the driver.
    _told: BufReader<std::process::ChildStdout>,
    _profile: tempfile::TempDir,
}

impl Browser {
    /// Starts one; none where the machine has no Chromium and driver.
    #[must_use]
    pub fn start() -> Option<Self> {
        let mut command = Command::new("chromedriver");
        let mut driver = command.arg("--port=0").stdout(Stdio::piped()).stderr(Stdio::null()).spawn().ok()?;
        let mut told = BufReader::new(driver.stdout.take().unwrap());
        let port = told.by_ref().lines().find_map(|line| {
            let line = line.unwrap();
            line.split("successfully on port ").nth(1)?.trim_end_matches('.').parse().ok()
        });
        let profile = tempfile::tempdir().unwrap();
        let mut browser = Self { driver, port: port.unwrap(), session: String::new(), _told: told, _profile: profile };
        // A sandbox of its own needs rights that a container does not have; it sees this project's page alone.
        let folder = format!("--user-data-dir={}", browser._profile.path().display());
        let args = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", &folder];
        let capabilities = json!({"alwaysMatch": {
            "browserName": "chrome", "goog:chromeOptions": {"args": args}, "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"},
        }});
        let session = browser.ask("POST", "/session", &json!({"capabilities": capabilities}));
        session["sessionId"].as_str().unwrap_or_else(|| panic!("{session}")).clone_into(&mut browser.session);
        Some(browser)
    }

    /// Opens a page.
    pub fn open(&self, url: &str) {
        self.of_session("POST", "/url", &json!({"url": url}));
    }

    /// Runs this in the page; what it returns.
    #[must_use]
    pub fn run(&self, script: &str) -> Value {
        self.of_session("POST", "/execute/sync", &json!({"script": script, "args": []}))
    }

    /// Waits until this, run in the page, is what it is waited for to be.
    pub fn wait(&self, script: &str, what: impl Fn(&Value) -> bool) -> Value {
        let began = Instant::now();
        loop {
            let found = self.run(script);
            if what(&found) {
                return found;
            }
            assert!(began.elapsed() < PATIENCE, "{script}: {found}; the page says {}", self.run("return document.body.innerText"));
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// Types into whatever has the keyboard, a key for each character.
    pub fn press(&self, text: &str) {
        let strokes = text.chars().flat_map(|key| ["keyDown", "keyUp"].map(|what| json!({"type": what, "value": key})));
        let keyboard = json!({"type": "key", "id": "keyboard", "actions": strokes.collect::<Vec<_>>()});
        self.of_session("POST", "/actions", &json!({"actions": [keyboard]}));
    }

    /// What the page wrote to its console, or the browser about it.
    #[must_use]
    pub fn console(&self) -> Vec<String> {
        let log = self.of_session("POST", "/se/log", &json!({"type": "browser"}));
        log.as_array().unwrap().iter().map(|entry| format!("{}: {}", entry["level"], entry["message"])).collect()
    }

    /// Where the page's requests went: scheme and authority of each.
    #[must_use]
    pub fn asked(&self) -> BTreeSet<String> {
        let log = self.of_session("POST", "/se/log", &json!({"type": "performance"}));
        let url = |entry: &Value| {
            let message: Value = serde_json::from_str(entry["message"].as_str()?).ok()?;
            let message = &message["message"];
            let is_request = message["method"] == "Network.requestWillBeSent";
            is_request.then(|| message["params"]["request"]["url"].as_str().unwrap().to_owned())
        };
        let origin = |url: String| url.splitn(4, '/').take(3).collect::<Vec<_>>().join("/");
        log.as_array().unwrap().iter().filter_map(url).map(origin).collect()
    }

    fn of_session(&self, method: &str, path: &str, body: &Value) -> Value {
        self.ask(method, &format!("/session/{}{path}", self.session), body)
    }

    fn ask(&self, method: &str, path: &str, body: &Value) -> Value {
        let body = if body.is_null() { String::new() } else { body.to_string() };
        let mut stream = TcpStream::connect(("127.0.0.1", self.port)).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let head = format!(
            "{method} {path} HTTP/1.1\r\nhost: 127.0.0.1:{}\r\nconnection: close\r\ncontent-length: {}\r\n\r\n",
            self.port,
            body.len()
        );
        stream.write_all((head + &body).as_bytes()).unwrap();
        // The driver keeps its connections whatever it is asked.
        let (mut stream, mut length) = (BufReader::new(stream), 0);
        loop {
            let mut line = String::new();
            stream.read_line(&mut line).unwrap();
            if let Some(bytes) = line.to_ascii_lowercase().strip_prefix("content-length:") {
                length = bytes.trim().parse().unwrap();
            } else if line.trim().is_empty() {
                break;
            }
        }
        let mut body = vec![0; length];
        stream.read_exact(&mut body).unwrap();
        let mut answer: Value = serde_json::from_slice(&body).unwrap_or_else(|error| panic!("{path}: {error}: {}", crate::text(&body)));
        assert!(answer["value"]["error"].is_null(), "{path}: {}", answer["value"]);
        answer["value"].take()
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        // The driver ends its browser with the session; it is not left to itself where that fails.
        let ended = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| self.of_session("DELETE", "", &Value::Null)));
        drop(ended);
        drop(self.driver.kill());
        drop(self.driver.wait());
    }
}
