// SPDX-License-Identifier: Apache-2.0
//! Pings: a matrix from every pod to every other pod, and a stream whose lost packets are counted.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::net::IpAddr;
use std::process::Stdio;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use nix::sys::signal::Signal;
use tokio::process::Child;
use tokio::task::JoinSet;

use super::netns::checked;
use super::node::{Node, Pod};
use super::process::{self, PATIENCE};

/// One ping of the matrix.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Ping {
    /// Name of the pod that sends the request.
    pub from: String,
    /// Name of the pod that should answer.
    pub to: String,
    /// The address that is pinged.
    pub addr: IpAddr,
    /// True if there was an answer.
    pub ok: bool,
}

/// Pings every address of every pod once from every other pod.
///
/// # Errors
/// A ping process cannot be waited for. A ping without an answer is not an error; the result says so.
pub async fn matrix(nodes: &[Node]) -> Result<Vec<Ping>> {
    let pods: Vec<&Pod> = nodes.iter().flat_map(|node| &node.pods).collect();
    let mut running = JoinSet::new();
    let mut all = Vec::new();
    for from in &pods {
        for to in pods.iter().filter(|to| to.ns.name() != from.ns.name()) {
            for addr in &to.addrs {
                let mut command = from.ns.command("ping");
                command.args(["-n", "-q", "-c1", "-W1", &addr.to_string()]);
                let (from, to, addr) = (from.ns.name().to_owned(), to.ns.name().to_owned(), *addr);
                running.spawn(async move { Ping { from, to, addr, ok: checked(&mut command).await.is_ok() } });
                // The number of concurrent processes is limited, because a matrix of 50 pods needs 2450 of them.
                if running.len() >= 16 {
                    all.extend(running.join_next().await.transpose()?);
                }
            }
        }
    }
    while let Some(ping) = running.join_next().await {
        all.push(ping?);
    }
    all.sort_unstable();
    Ok(all)
}

/// The result of a stream of pings.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Loss {
    /// Number of requests from the first to the last one that was answered.
    pub sent: usize,
    /// Number of these requests that were not answered.
    pub lost: usize,
}

impl Loss {
    /// Counts the answers with these sequence numbers. iputils begins with 1, and busybox with 0.
    fn of(seen: &BTreeSet<usize>) -> Loss {
        let sent = seen.first().zip(seen.last()).map_or(0, |(first, last)| last - first + 1);
        Loss { sent, lost: sent - seen.len() }
    }
}

/// A ping that runs while something else happens.
#[derive(Debug)]
pub struct Stream {
    child: Option<Child>,
    /// What ping prints, in a file without a name. Behind a full pipe, ping would stop and send nothing until somebody reads.
    output: BufReader<File>,
    /// The beginning of a line that ping has not written to its end.
    line: String,
    seen: BTreeSet<usize>,
}

impl Stream {
    /// Starts a stream of 100 packets per second, and waits for the first answer.
    ///
    /// # Errors
    /// ping cannot be started, or there is no answer.
    pub async fn start(from: &Pod, to: IpAddr) -> Result<Stream> {
        Stream::with_pause(from, to, "0.01").await
    }

    /// Does the same as [`Stream::start`], with this pause between two packets in seconds.
    ///
    /// # Errors
    /// As [`Stream::start`].
    pub async fn with_pause(from: &Pod, to: IpAddr, pause: &str) -> Result<Stream> {
        let written = tempfile::NamedTempFile::new().context("a file for the output of ping")?;
        let output = BufReader::new(written.reopen().context("open the output of ping")?);
        let mut command = from.ns.command("ping");
        command.args(["-n", "-i", pause, &to.to_string()]).stdout(written.into_file()).stderr(Stdio::null());
        let child = Some(command.spawn().context("start ping")?);
        let mut stream = Stream { child, output, line: String::new(), seen: BTreeSet::new() };
        stream.answers(1, PATIENCE).await?;
        Ok(stream)
    }

    /// Waits until `count` more packets are answered.
    ///
    /// # Errors
    /// They are not answered within `limit`.
    pub async fn answers(&mut self, count: usize, limit: Duration) -> Result<()> {
        // Answers that were written before this call do not show that packets are answered now.
        self.read()?;
        let (goal, deadline) = (self.seen.len() + count, Instant::now() + limit);
        while self.seen.len() < goal {
            ensure!(Instant::now() < deadline, "no answer to ping in time");
            tokio::time::sleep(Duration::from_millis(5)).await;
            self.read()?;
        }
        Ok(())
    }

    /// Waits until every request before the last answer is answered. Returns the numbers of those that are not answered within `limit`. An answer
    /// that is late is not lost: on a busy machine, the packets in the queue of one processor wait while those of another one go on.
    ///
    /// # Errors
    /// The output of ping cannot be read.
    pub async fn unanswered(&mut self, limit: Duration) -> Result<Vec<usize>> {
        let deadline = Instant::now() + limit;
        loop {
            self.read()?;
            let missing = gaps(&self.seen);
            if missing.is_empty() || Instant::now() >= deadline {
                return Ok(missing);
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    /// Returns the number of the last request whose answer was read.
    pub fn last(&self) -> usize {
        self.seen.last().copied().unwrap_or_default()
    }

    /// Ends the stream. Requests after the last answer do not count as lost; call [`Stream::answers`] first if they
    /// should.
    ///
    /// # Errors
    /// ping cannot be ended.
    pub async fn stop(mut self) -> Result<Loss> {
        process::end(&mut self.child, Signal::SIGINT).await?;
        self.read()?;
        Ok(Loss::of(&self.seen))
    }

    /// Reads what ping has written since the last call.
    fn read(&mut self) -> Result<()> {
        while self.output.read_line(&mut self.line).context("read the output of ping")? > 0 && self.line.ends_with('\n')
        {
            self.seen.extend(sequence(&self.line));
            self.line.clear();
        }
        Ok(())
    }
}

/// Returns the numbers that are missing between the first and the last one.
fn gaps(seen: &BTreeSet<usize>) -> Vec<usize> {
    let Some((first, last)) = seen.first().zip(seen.last()) else { return Vec::new() };
    (*first..*last).filter(|number| !seen.contains(number)).collect()
}

/// Parses the sequence number of an answer: `64 bytes from 10.1.2.3: icmp_seq=7 ttl=62 time=0.1 ms`. That of
/// busybox prints `seq=7`. Lines about errors have no time.
fn sequence(line: &str) -> Option<usize> {
    line.contains(" time=").then_some(())?;
    line.split_once("seq=")?.1.split(' ').next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::{Loss, gaps, sequence};

    #[test]
    fn only_answers_have_a_sequence_number() {
        assert_eq!(sequence("64 bytes from 10.1.2.3: icmp_seq=17 ttl=62 time=0.112 ms"), Some(17));
        assert_eq!(sequence("64 bytes from 10.1.2.3: seq=0 ttl=64 time=0.050 ms"), Some(0));
        assert_eq!(sequence("From 10.1.2.1 icmp_seq=18 Destination Host Unreachable"), None);
        assert_eq!(sequence("PING 10.1.2.3 (10.1.2.3) 56(84) bytes of data."), None);
    }

    #[test]
    fn requests_without_an_answer_are_counted_wherever_the_numbers_begin() {
        for first in [0, 1] {
            let loss = |seen: &[usize]| Loss::of(&seen.iter().map(|seq| seq + first).collect());
            assert_eq!(loss(&[]), Loss { sent: 0, lost: 0 });
            assert_eq!(loss(&[0]), Loss { sent: 1, lost: 0 });
            assert_eq!(loss(&[0, 1, 4]), Loss { sent: 5, lost: 2 });
        }
    }

    #[test]
    fn the_numbers_of_unanswered_requests_are_between_the_first_and_the_last_answer() {
        let gaps = |seen: &[usize]| gaps(&seen.iter().copied().collect());
        assert_eq!(gaps(&[]), Vec::<usize>::new());
        assert_eq!(gaps(&[3, 4]), Vec::<usize>::new());
        assert_eq!(gaps(&[3, 4, 6, 9]), [5, 7, 8]);
    }
}
