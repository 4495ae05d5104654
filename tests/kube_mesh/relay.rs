// SPDX-License-Identifier: Apache-2.0
//! A TCP relay from an address of the lab's fabric to the API server's port on 127.0.0.1 of the machine. When it is closed, the server is
//! away for this lab, but not for others.

use std::io::ErrorKind;
use std::net::TcpListener;
use std::os::fd::AsFd;
use std::thread::JoinHandle;
use std::time::Instant;

use anyhow::{Context, Result};
use nix::sched::{CloneFlags, setns};
use tokio::net::TcpStream;
use tokio::sync::oneshot;
use tokio::task::LocalSet;

use crate::site::LIMIT;

/// The address and port for the nodes: that of the fabric's bridge.
pub const ADDRESS: &str = "192.168.77.1:6443";
/// The same by IPv6.
pub const ADDRESS_V6: &str = "[fd77::1]:6443";
/// The relay listens on all addresses of the fabric.
const LISTEN: &str = "[::]:6443";

pub struct Relay {
    to: u16,
    open: Option<(oneshot::Sender<()>, JoinHandle<()>)>,
}

impl Relay {
    /// Creates a closed relay to this port. Use it on the lab's thread.
    pub fn new(to: u16) -> Relay {
        Relay { to, open: None }
    }

    pub fn open(&mut self) -> Result<()> {
        let to = self.to;
        let (close, closed) = oneshot::channel();
        let (ready, is_ready) = std::sync::mpsc::channel();
        let thread = std::thread::spawn(move || {
            let listener = listen();
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            let failed = listener.is_err();
            let listener =
                ready.send(listener.as_ref().map(drop).map_err(|error| format!("{error:#}"))).map(|()| listener);
            if failed {
                return;
            }
            let listener = listener.unwrap().unwrap();
            // Open connections end with the runtime.
            runtime.block_on(LocalSet::new().run_until(async move {
                tokio::select! {
                    () = carry(listener, to) => {}
                    _ = closed => {}
                }
            }));
        });
        is_ready.recv().context("a thread ended")?.map_err(anyhow::Error::msg)?;
        self.open = Some((close, thread));
        Ok(())
    }

    /// Refuses connections and closes the open ones.
    pub fn close(&mut self) {
        if let Some((close, thread)) = self.open.take() {
            drop(close);
            thread.join().unwrap();
        }
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.close();
    }
}

/// Creates a listener in the namespace of the fabric. The thread returns to its own namespace. A process that another test is just
/// starting has a copy of the last listener until it executes its program.
fn listen() -> Result<TcpListener> {
    let (here, there) = (std::fs::File::open("/proc/thread-self/ns/net")?, std::fs::File::open("/run/netns/fabric")?);
    setns(there.as_fd(), CloneFlags::CLONE_NEWNET).context("enter the fabric")?;
    let deadline = Instant::now() + LIMIT;
    let listener = loop {
        match TcpListener::bind(LISTEN) {
            Err(error) if error.kind() == ErrorKind::AddrInUse && Instant::now() < deadline => std::thread::yield_now(),
            done => break done,
        }
    };
    setns(here.as_fd(), CloneFlags::CLONE_NEWNET).context("leave the fabric")?;
    listener.with_context(|| format!("listen on {LISTEN}"))
}

async fn carry(listener: TcpListener, to: u16) {
    listener.set_nonblocking(true).unwrap();
    let listener = tokio::net::TcpListener::from_std(listener).unwrap();
    loop {
        let Ok((mut from, _)) = listener.accept().await else { continue };
        tokio::task::spawn_local(async move {
            if let Ok(mut server) = TcpStream::connect(("127.0.0.1", to)).await {
                // Either side may close the connection at any time.
                let _ = tokio::io::copy_bidirectional(&mut from, &mut server).await;
            }
        });
    }
}
