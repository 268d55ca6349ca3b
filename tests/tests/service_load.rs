//! The service under load: many tenants and clients at once, reads timed, idle streams held. `cargo xtask test --slow` runs it; figures are printed.
#![expect(clippy::disallowed_methods, reason = "tests work on real folders and sockets, as a user does")]
#![expect(clippy::unwrap_used, clippy::indexing_slicing, reason = "a panic is how a test fails")]

use std::collections::BTreeSet;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use nodus_tests::{Host, golden, guest, host, token_lines};
use serde_json::{Value, json};

const TENANTS: usize = 200;
const JOBS: usize = 2000;
const CLIENTS: usize = 64;
const STREAMS: usize = 10_000;
/// What a read may take at the 99th percentile.
const READ: Duration = Duration::from_millis(50);
/// How long all jobs may take on a busy machine.
const END: Duration = Duration::from_secs(1200);
/// Where an answer that costs nothing takes longer than this before anything was begun, the machine works for others too: a read may take longer in
/// the same measure, and never more than five times as long.
const QUIET: Duration = Duration::from_millis(2);

struct Server {
    child: Child,
    address: String,
}

impl Drop for Server {
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

/// One connection that is kept.
struct Client {
    stream: BufReader<TcpStream>,
    token: String,
}

impl Client {
    fn new(address: &str, token: &str) -> Self {
        let stream = TcpStream::connect(address).unwrap();
        stream.set_nodelay(true).unwrap();
        Self { stream: BufReader::new(stream), token: token.to_owned() }
    }

    fn send(&mut self, method: &str, path: &str, body: &str) {
        let head = format!(
            "{method} {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {}\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
            self.token,
            body.len()
        );
        self.stream.get_mut().write_all(head.as_bytes()).unwrap();
    }

    /// Status and headers.
    fn head(&mut self) -> (u16, usize) {
        let (mut status, mut length) = (0, 0);
        loop {
            let mut line = String::new();
            self.stream.read_line(&mut line).unwrap();
            if let Some(rest) = line.strip_prefix("HTTP/1.1 ") {
                status = rest[..3].parse().unwrap();
            } else if let Some(rest) = line.to_ascii_lowercase().strip_prefix("content-length:") {
                length = rest.trim().parse().unwrap();
            } else if line.trim().is_empty() {
                return (status, length);
            }
        }
    }

    fn call(&mut self, method: &str, path: &str, body: &str) -> (u16, Value) {
        self.send(method, path, body);
        let (status, length) = self.head();
        let mut body = vec![0; length];
        self.stream.read_exact(&mut body).unwrap();
        (status, serde_json::from_slice(&body).unwrap_or(Value::Null))
    }
}

fn serve(host: &Host) -> Server {
    let sft = format!("sft={}", guest("sft").display());
    let mut command = Command::new(self::host());
    command.args(["serve", "--listen", "127.0.0.1:0", "--component", &sft]).env("NODUS_DATA_DIR", host.path("data"));
    let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let address = line.trim().strip_prefix("listening on http://").unwrap_or_else(|| panic!("{line:?}")).to_owned();
    Server { child, address }
}

/// What an answer that costs nothing takes on this machine at the 99th percentile, over a socket, before the service has anything to do: other
/// programs make it long.
fn echo() -> Duration {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut asker = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    asker.set_nodelay(true).unwrap();
    let answer = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let mut byte = [0];
        while stream.read_exact(&mut byte).is_ok() {
            stream.write_all(&byte).unwrap();
        }
    });
    let once = |_| {
        std::thread::sleep(Duration::from_millis(3));
        let asked = Instant::now();
        asker.write_all(&[1]).and_then(|()| asker.read_exact(&mut [0])).unwrap();
        asked.elapsed()
    };
    let mut times: Vec<Duration> = (0..300).map(once).collect();
    drop(asker);
    answer.join().unwrap();
    percentile(&mut times, 0.99)
}

fn percentile(times: &mut [Duration], part: f64) -> Duration {
    times.sort_unstable();
    #[expect(clippy::cast_precision_loss, clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "an index")]
    let index = ((times.len() - 1) as f64 * part) as usize;
    times[index]
}

#[test]
fn two_thousand_jobs_of_two_hundred_tenants_none_lost_none_twice() {
    let host = Host::new();
    let data = token_lines(&golden("data/tokens.safetensors"), ["input_ids", "labels", "attention_mask"]);
    host.ok(["model", "import", golden("models/llama").to_str().unwrap(), "--name", "llama"]);
    let tokens: Vec<String> = (0..TENANTS).map(|n| host.ok(["tenant", "add", &format!("t{n}")]).trim().to_owned()).collect();
    let server = serve(&host);
    let (next, is_over) = (AtomicUsize::new(0), AtomicBool::new(false));
    for token in &tokens {
        assert_eq!(Client::new(&server.address, token).call("PUT", "/v1/data/tokens", &data).0, 201);
    }
    let slowness = (echo().as_secs_f64() / QUIET.as_secs_f64()).clamp(1.0, 5.0);
    let began = Instant::now();
    let (mut ids, mut reads) = (Vec::new(), Vec::new());
    std::thread::scope(|scope| {
        let submit = || {
            let mut made = Vec::new();
            loop {
                let number = next.fetch_add(1, Ordering::Relaxed);
                if number >= JOBS {
                    return made;
                }
                let mut client = Client::new(&server.address, &tokens[number % TENANTS]);
                let parameters = json!({ "rank": 2, "steps": 1, "learning_rate": number });
                let body = json!({ "component": "sft", "model": "llama", "data": "tokens", "parameters": parameters }).to_string();
                let (status, answer) = client.call("POST", "/v1/jobs", &body);
                assert_eq!(status, 201, "{answer}");
                made.push((number % TENANTS, answer["jobs"][0]["id"].as_str().unwrap().to_owned()));
            }
        };
        let read = |tenant: usize| {
            let (mut client, mut times) = (Client::new(&server.address, &tokens[tenant]), Vec::new());
            while !is_over.load(Ordering::Relaxed) {
                for path in ["/v1/jobs?limit=10", "/v1/usage"] {
                    let asked = Instant::now();
                    assert_eq!(client.call("GET", path, "").0, 200);
                    times.push(asked.elapsed());
                }
                std::thread::sleep(Duration::from_millis(40));
            }
            times
        };
        let readers: Vec<_> = (0..8).map(|n| scope.spawn(move || read(n * 25))).collect();
        let clients: Vec<_> = (0..CLIENTS).map(|_| scope.spawn(submit)).collect();
        ids.extend(clients.into_iter().flat_map(|client| client.join().unwrap()));
        is_over.store(true, Ordering::Relaxed);
        reads.extend(readers.into_iter().flat_map(|reader| reader.join().unwrap()));
    });
    let took = began.elapsed();
    let ids: BTreeSet<(usize, String)> = ids.into_iter().collect();
    assert_eq!(ids.len(), JOBS);
    let mut ended = succeeded(&server, &tokens, &ids);
    let p99 = percentile(&mut reads, 0.99);
    let bound = READ.mul_f64(slowness);
    println!(
        "{JOBS} jobs of {TENANTS} tenants by {CLIENTS} clients in {took:.1?}; {} reads meanwhile, p99 {p99:.1?} of {bound:.1?}",
        reads.len()
    );
    println!("{ended} jobs had ended by then");
    assert!(p99 < bound, "reads wait for what works: {p99:?}");
    while ended < JOBS {
        assert!(began.elapsed() < END, "{ended} of {JOBS} jobs have ended after {:?}", began.elapsed());
        std::thread::sleep(Duration::from_secs(1));
        ended = succeeded(&server, &tokens, &ids);
    }
    println!("all had ended after {:.1?}", began.elapsed());
    // One receipt of each, and of nothing else.
    let ledger = std::fs::read_to_string(host.path("data/ledger.jsonl")).unwrap();
    let entries = ledger.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let mut receipts: Vec<String> =
        entries.filter(|entry| entry["kind"] == "receipt").map(|entry| entry["job"].as_str().unwrap().to_owned()).collect();
    receipts.sort_unstable();
    let mut jobs: Vec<String> = ids.into_iter().map(|(_, job)| job).collect();
    jobs.sort_unstable();
    assert!(receipts == jobs, "the ledger has {} receipts of {JOBS} jobs", receipts.len());
}

/// How many jobs have succeeded. Each is in its tenant's list, none is there that nobody submitted, none failed, and none was begun twice.
fn succeeded(server: &Server, tokens: &[String], ids: &BTreeSet<(usize, String)>) -> usize {
    let (mut listed, mut succeeded) = (BTreeSet::new(), 0);
    for (tenant, token) in tokens.iter().enumerate() {
        let (_, page) = Client::new(&server.address, token).call("GET", "/v1/jobs?limit=200", "");
        for job in page["jobs"].as_array().unwrap() {
            let (state, attempts) = (job["state"].as_str().unwrap(), job["attempts"].as_u64().unwrap());
            assert!(attempts <= 1 && ["queued", "running", "succeeded"].contains(&state), "{job}");
            if state == "succeeded" {
                assert_eq!((attempts, &job["last_step"]["step"]), (1, &json!(1)), "{job}");
                succeeded += 1;
            }
            assert!(listed.insert((tenant, job["id"].as_str().unwrap().to_owned())), "listed twice: {job}");
        }
    }
    assert!(listed == *ids, "{} jobs are listed of {JOBS}", listed.len());
    succeeded
}

#[test]
fn ten_thousand_idle_streams_are_held_and_woken() {
    let host = Host::new();
    host.ok(["model", "import", golden("models/llama").to_str().unwrap(), "--name", "llama"]);
    let token = host.ok(["tenant", "add", "a", "--quota", "requests-per-second=none"]).trim().to_owned();
    let server = serve(&host);
    let mut client = Client::new(&server.address, &token);
    let data = token_lines(&golden("data/tokens.safetensors"), ["input_ids", "labels", "attention_mask"]);
    assert_eq!(client.call("PUT", "/v1/data/tokens", &data).0, 201);
    // One that would train for days, whether or not it is started meanwhile.
    let body = json!({ "component": "sft", "model": "llama", "data": "tokens", "parameters": { "steps": 100_000_000 }, "lane": "solo" });
    let (_, made) = client.call("POST", "/v1/jobs", &body.to_string());
    let job = made["jobs"][0]["id"].as_str().unwrap();
    let path = format!("/v1/jobs/{job}/events?kinds=artifact");
    // Each asks as soon as it is connected, as a reader does: a connection that asks nothing for long is closed.
    let follow = |_| {
        let mut stream = Client::new(&server.address, &token);
        stream.send("GET", &path, "");
        stream
    };
    let mut streams: Vec<Client> = (0..STREAMS).map(follow).collect();
    for stream in &mut streams {
        assert_eq!(stream.head().0, 200);
    }
    std::thread::sleep(Duration::from_secs(60));
    // The one of before asked nothing for a minute, and was cut.
    let mut client = Client::new(&server.address, &token);
    let asked = Instant::now();
    assert_eq!(client.call("GET", "/v1/usage", "").0, 200);
    println!("{STREAMS} idle streams held for a minute; a read beside them took {:.1?}", asked.elapsed());
    assert_eq!(client.call("POST", &format!("/v1/jobs/{job}/cancel"), "{\"how\": \"cancel\"}").0, 202);
    for stream in &mut streams {
        let mut line = String::new();
        while !line.starts_with("event: end") {
            line.clear();
            assert!(stream.stream.read_line(&mut line).unwrap() > 0, "a stream was cut off");
        }
    }
}
