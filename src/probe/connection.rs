// SPDX-License-Identifier: Apache-2.0
//! A TCP connection as a probe. A peer that answers no echo request may be cut off, or only behind a firewall that drops ICMP. Its answer to a
//! connection shows that packets reach it.

use std::io::ErrorKind;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use tokio::net::TcpStream;
use tokio::time::{Instant, timeout};

/// The port of the kubelet, which firewalls of nodes let pass. Where nothing listens, the kernel of the peer refuses the connection, and that is an
/// answer, too.
pub const PORT: u16 = 10250;
/// How long an answer is waited for. The kernel would send a second packet after a second.
const WAIT: Duration = Duration::from_millis(900);

/// Returns the time until this address accepted or refused a connection. `None` if it did neither.
pub async fn answers(to: IpAddr) -> Option<Duration> {
    answers_on(SocketAddr::new(to, PORT)).await
}

async fn answers_on(to: SocketAddr) -> Option<Duration> {
    let began = Instant::now();
    let is_answer = match timeout(WAIT, TcpStream::connect(to)).await {
        Ok(Ok(_)) => true,
        Ok(Err(error)) => error.kind() == ErrorKind::ConnectionRefused,
        Err(_) => false,
    };
    is_answer.then(|| began.elapsed())
}

#[cfg(test)]
mod tests {
    use tokio::net::TcpListener;

    use super::*;

    #[tokio::test]
    async fn a_connection_that_is_accepted_or_refused_is_an_answer() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        assert!(answers_on(address).await.is_some());
        drop(listener);
        assert!(answers_on(address).await.is_some(), "refused");
        // The kernel itself refuses to send there.
        assert!(answers_on("224.0.0.1:9".parse().unwrap()).await.is_none());
    }
}
