// SPDX-License-Identifier: Apache-2.0
//! The clients of a server by age. Whoever only connects and says nothing must not keep out those who ask: when there are too many clients,
//! the oldest one is disconnected.

use std::collections::VecDeque;

use tokio::task::{AbortHandle, Id};

/// The tasks of clients that are connected, the oldest first.
#[derive(Debug)]
pub struct ClientsByAge {
    clients: VecDeque<AbortHandle>,
    max: usize,
}

impl ClientsByAge {
    /// Creates an empty list for at most this number of clients.
    pub fn new(max: usize) -> ClientsByAge {
        ClientsByAge { clients: VecDeque::new(), max }
    }

    /// Adds a client. If there are too many, the oldest one is disconnected.
    pub fn add(&mut self, client: AbortHandle) {
        self.clients.retain(|client| !client.is_finished());
        if self.clients.len() >= self.max
            && let Some(oldest) = self.clients.pop_front()
        {
            oldest.abort();
        }
        self.clients.push_back(client);
    }

    /// Removes a client, so that it is not disconnected for others.
    pub fn remove(&mut self, client: Id) {
        self.clients.retain(|other| other.id() != client);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_oldest_of_too_many_clients_is_disconnected_and_those_that_ended_or_were_removed_do_not_count() {
        let (mut by_age, mut clients) = (ClientsByAge::new(4), Vec::new());
        let add = |by_age: &mut ClientsByAge, clients: &mut Vec<tokio::task::JoinHandle<()>>| {
            clients.push(tokio::spawn(std::future::pending()));
            by_age.add(clients.last().unwrap().abort_handle());
        };
        add(&mut by_age, &mut clients);
        let brief = tokio::spawn(async {});
        by_age.add(brief.abort_handle());
        (2..4).for_each(|_| add(&mut by_age, &mut clients));
        brief.await.unwrap();
        add(&mut by_age, &mut clients);
        tokio::task::yield_now().await;
        assert!(clients.iter().all(|client| !client.is_finished()), "one had ended, so there was room");
        by_age.remove(clients[0].id());
        add(&mut by_age, &mut clients);
        tokio::task::yield_now().await;
        assert!(clients.iter().all(|client| !client.is_finished()), "one was removed, so there was room");
        add(&mut by_age, &mut clients);
        while !clients[1].is_finished() {
            tokio::task::yield_now().await;
        }
        assert!(clients.iter().enumerate().all(|(number, client)| number == 1 || !client.is_finished()));
    }
}
