//! A watch over the end of a connection, and of the service itself.

use std::process::{Command, Stdio};
use std::time::Duration;

use nodus_tests::{Host, Server, guest, host, text};
use serde_json::Value;

#[test]
fn a_watch_goes_on_where_the_service_was_cut_off_and_says_so() {
    let own = Host::with_llama();
    let token = own.tenant("a", &[]);
    let (sft, data) = (guest("sft"), own.path("tokens.jsonl"));
    let options = ["--device", "cpu", "--snapshot-every", "0.3"];
    let server = Server::start(&own, &options);
    let url = server.url.clone();
    let submit = [sft.to_str().unwrap(), "--model", "llama", "--data", data.to_str().unwrap(), "--set", "steps=800"];
    let id = server.submit(&token, &submit).remove(0);
    let watch = |more: &[&str]| {
        let mut command = Command::new(host());
        command.args(["watch", &id]).args(more).env("NODUS_URL", &url).env("NODUS_TOKEN", &token).env_remove("NODUS_DATA_DIR");
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    };
    let watched = [watch(&["--json"]), watch(&[])];
    server.steps(&token, &id, 50);
    server.kill();
    // Long enough for a try that finds nobody.
    std::thread::sleep(Duration::from_millis(1500));
    let server = Server::start_at(&own, &url, &options);
    assert_eq!(server.ended(&token, &id)["state"], "succeeded");
    let [json, lines] = watched.map(|child| child.wait_with_output().unwrap());
    for output in [&json, &lines] {
        let said = text(&output.stderr);
        assert!(output.status.success(), "{said}");
        assert!(said.contains("trying again in 1 s") && said.contains("trying again in 2 s"), "{said}");
        assert_eq!(said.matches("the service answers again: going on after event ").count(), 1, "{said}");
    }
    let events: Vec<Value> = text(&json.stdout).lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let positions: Vec<u64> = events.iter().map(|event| event["position"].as_u64().unwrap()).collect();
    assert!(positions.is_sorted_by(|a, b| a < b), "told twice: {positions:?}");
    let steps = |is: &dyn Fn(&Value) -> bool| events.iter().filter(|event| is(event)).count();
    assert_eq!(steps(&|event| event["kind"] == "step"), 800);
    assert_eq!(steps(&|event| event["kind"] == "state" && event["body"]["state"] == "succeeded"), 1);
    // What the component tells of a step is what the host told of it.
    let told = steps(&|event| ["step", "evaluation", "artifact"].iter().any(|kind| event["kind"] == *kind));
    let lines = text(&lines.stdout);
    assert_eq!(lines.lines().filter(|line| line.starts_with("step ")).count(), told, "a line each");
    assert!(lines.contains("\n\nID ") && lines.lines().last().unwrap().contains("succeeded  800"), "what became of it, in the end");
}
