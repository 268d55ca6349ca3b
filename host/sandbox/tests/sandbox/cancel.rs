//! A run is dropped at each of its awaits, one after the other: nothing stays behind, whichever it was.

use std::future::Future;
use std::pin::{Pin, pin};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use crate::support::{Engine, Job, guest};

/// Ends, unfinished, when the inner future waits for the n-th time; counts the times.
struct Until<F> {
    inner: Pin<Box<F>>,
    waits: usize,
    most: usize,
}

impl<F: Future> Future for Until<F> {
    type Output = Option<F::Output>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        match self.inner.as_mut().poll(cx) {
            Poll::Ready(output) => Poll::Ready(Some(output)),
            Poll::Pending => {
                self.waits += 1;
                if self.waits == self.most { Poll::Ready(None) } else { Poll::Pending }
            }
        }
    }
}

/// Runs a job up to its n-th await and drops it there. Whether it was still running, and the commands that its engine saw.
async fn cut(params: &str, n: usize) -> (bool, Arc<Mutex<Vec<String>>>) {
    let job = Job::on(Engine::Late, params);
    let commands = job.commands.clone();
    let mut run = pin!(Until { inner: Box::pin(job.run()), waits: 0, most: n });
    let ended = run.as_mut().await;
    (ended.is_none(), commands)
}

/// Adapters that an engine still holds after these commands.
fn held(commands: &[String]) -> usize {
    let mut held = 0;
    for command in commands {
        match command.split(' ').next().unwrap() {
            "create" | "load" => held += 1,
            "drop-adapter" => held -= 1,
            "drop-job" => held = 0,
            _ => {}
        }
    }
    held
}

async fn all_of(params: &str, at_least: usize) {
    guest();
    let tasks = tokio::runtime::Handle::current().metrics();
    for n in 1.. {
        let (was_running, commands) = cut(params, n).await;
        let began = Instant::now();
        let asked = |word: &str| commands.lock().unwrap().iter().filter(|command| command.starts_with(word)).count();
        // The last word to an engine that was used is to give up the job; it may be on its way.
        while (asked("create") + asked("load") > 0 && asked("drop-job") == 0) || held(&commands.lock().unwrap()) > 0 {
            assert!(began.elapsed() < Duration::from_secs(5), "{params}, await {n}: {:?}", commands.lock().unwrap());
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        assert_eq!(tasks.num_alive_tasks(), 0, "{params}, await {n}");
        if !was_running {
            assert!(n > at_least, "{params} waited {n} times only, expected more than {at_least}");
            return;
        }
    }
}

#[tokio::test]
async fn training_and_its_tidying_up() {
    all_of("train 3", 6).await;
}

#[tokio::test]
async fn calls_that_nobody_waits_for() {
    all_of("fire-and-forget 3", 5).await;
}

#[tokio::test]
async fn saving_and_loading() {
    all_of("save-twice", 9).await;
    all_of("load", 6).await;
}

#[tokio::test]
async fn several_adapters() {
    all_of("two-adapters", 7).await;
    all_of("outlive", 4).await;
}
